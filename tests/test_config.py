from __future__ import annotations

import dataclasses
import re
import typing
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from turbogr.config import (
    HARD_DELAY,
    MAX_TIME_BUCKETS,
    Config,
    EvaluateConfig,
    FeatureConfig,
    OptimizerConfig,
    TableConfig,
    TrainConfig,
    dump_config,
    flat_config,
    load_config,
    load_run_config,
    parse,
    resolve,
)
from turbogr.config.schema import VERSION
from turbogr.errors import Note, UserError
from turbogr.ops.jagged_attention import MAX_TIME_WEIGHTS


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_an_empty_recipe_is_the_defaults(recipe):
    assert load_config(recipe("")) == Config()


def test_values_arrive_where_they_belong(recipe):
    config = load_config(recipe("model: {dim: 32, num_heads: 4}\noptimizer: {lr: 1e-3, betas: [0.8, 0.9]}\n"))
    assert (config.model.dim, config.model.num_heads) == (32, 4)
    assert config.optimizer.lr == 1e-3  # which YAML itself reads as text
    assert config.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: {}", ["unknown key 'modle'", "recipe.yaml", "'model'"]),
        ("train: {epoch: 3}", ["unknown key 'epoch'", "train", "'epochs'"]),
        ("train: {0: 3}", ["unknown key '0'"]),
        ("train: {epochs: many}", ["epochs takes a whole number", "'many'"]),
        ("train: {epochs: 2.5}", ["epochs takes a whole number", "2.5"]),
        ("train: {epochs: true}", ["epochs takes a whole number"]),
        ("train: {epochs: .inf}", ["epochs takes a whole number"]),
        ("train: {epochs: .nan}", ["epochs takes a whole number"]),
        ("train: {tensorboard: 1}", ["tensorboard takes true or false"]),
        ("train: {device: 3}", ["device takes text"]),
        ("optimizer: {lr: fast}", ["lr takes a number", "'fast'"]),
        ("optimizer: {lr: .nan}", ["lr takes a number"]),
        ("optimizer: {lr: [1]}", ["lr takes a number"]),
        ("optimizer: {betas: 0.9}", ["betas takes a list"]),
        ("optimizer: {betas: [0.9]}", ["betas takes a list of 2"]),
        ("optimizer: {betas: [0.9, 1.0]}", ["optimizer.betas", "[0, 1)"]),
        ("model: {name: hsut}", ["'hsut'", "'hstu'"]),
        ("model: {name: [hstu]}", ["name", "hstu"]),
        ("model: {name: null}", ["name takes text"]),
        ("model: {dropout: null}", ["dropout takes a number"]),
        ("model: 3", ["model", "mapping"]),
        ("[1, 2]", ["mapping"]),
        ("model: {dim: 0}", ["model.dim must be positive"]),
        ("model: {num_time_buckets: 65536}", ["model.num_time_buckets must be between 1 and 65535", "got 65536"]),
        ("model: {dropout: 1.0}", ["model.dropout must be below 1"]),
        ("model: {dim: 10, num_heads: 3}", ["model.dim 10", "model.num_heads 3"]),
        ("data: {batch_size: 2, batch_tokens: 10}", ["data.batch_size", "data.batch_tokens"]),
        ("parallel: {balance: realocate}", ["'realocate'", "'reallocate'"]),
        ("parallel: {balance: token-budget}", ["token-budget", "data.batch_tokens"]),
        ("parallel: {cost: [1.0]}", ["cost takes a list of 2"]),
        ("parallel: {cost: [0, 0]}", ["parallel.cost", "not both 0"]),
        ("parallel: {cost: [-1, 2]}", ["parallel.cost", "not negative"]),
        ("parallel: {speeds: []}", ["parallel.speeds", "every rank"]),
        ("parallel: {speeds: [1, 0]}", ["parallel.speeds", "positive"]),
        ("evaluate: {metric: ndgc@10}", ["'ndgc@10'", "'ndcg@10'"]),
        ("evaluate: {ks: []}", ["evaluate.ks"]),
        ("evaluate: {metrics: [mean-rank]}", ["evaluate.metrics is 'mean-rank'", "--plugins"]),
        ("task: retreival", ["task is 'retreival'", "'retrieval'"]),
        ("model: {mask: casual}", ["model.mask is 'casual'", "'causal'"]),
        ("loss: {name: sampled_softmax}", ["loss.name is 'sampled_softmax'", "'sampled-softmax'"]),
        ("{loss: {name: gbce}, gbce: {t: 1.5}}", ["gbce.t must be between 0", "got 1.5"]),
        ("{loss: {name: bce}, gbce: {t: 0.5}}", ["gbce"]),
        ("train: {backend: gpu}", ["train.backend is 'gpu'", "auto, cpu, reference, triton"]),
        ("plugins: my_block.py", ["plugins takes a list"]),
        ("hstu: {size: 3}", ["the block 'hstu' has no section of its own"]),
        ("options: {}", ["unknown key 'options'"]),
        ("tables: {item: {dims: 3}}", ["unknown key 'dims'", "tables.item", "'dim'"]),
        ("tables: {item: {dim: 0}}", ["tables.item.dim must be positive"]),
        ("tables: {item: 3}", ["tables.item must be a mapping"]),
        ("tables: {1: {dim: 3}}", ["takes names as keys, got 1"]),
        ("tables: [item]", ["tables must be a mapping"]),
        ("features: {genre: {tables: genre}}", ["unknown key 'tables'", "features.genre", "'table'"]),
        ("train: {epochs: -1}", ["train.epochs must be positive"]),
        ("model: {dim: 3", ["not valid YAML"]),
    ],
)
def test_a_mistake_is_named_with_its_place(recipe, text, words):
    with pytest.raises(UserError) as caught:
        load_config(recipe(text))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_as_many_time_buckets_are_allowed_as_attention_serves(recipe):
    assert MAX_TIME_BUCKETS == MAX_TIME_WEIGHTS - 1
    assert load_config(recipe("model: {num_time_buckets: 65535}")).model.num_time_buckets == MAX_TIME_BUCKETS


def test_a_recipe_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the recipe .*missing.yaml: there is no such file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(UserError, match="cannot read the recipe"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read the recipe"):
        load_config(tmp_path / "binary.yaml")


def test_tables_and_features_go_by_names_of_the_user(recipe):
    text = (
        "tables: {item: {dim: 8}, tag: {rows: 9, optimizer: adagrad, lr: 1e-2}}\nfeatures: {genre: {table: tag}, tag: }"
    )
    config = load_config(recipe(text), ["tables.tag.dim=4"])
    assert config.tables == {"item": TableConfig(dim=8), "tag": TableConfig(9, 4, "adagrad", 0.01)}
    assert config.features == {"genre": FeatureConfig(table="tag"), "tag": FeatureConfig()}
    assert load_config(recipe(dump_config(config))) == config


def test_settings_by_their_keys(recipe):
    flat = flat_config(load_config(recipe("tables: {item: {dim: 8}}\ntrain: {epochs: 3}")))
    assert (flat["task"], flat["tables.item.dim"], flat["train.epochs"]) == ("retrieval", 8, 3)
    assert "options" not in flat and "model" not in flat


def test_overrides_win_and_the_last_one_most(recipe):
    path = recipe("train: {epochs: 3}\n")
    config = load_config(path, ["train.epochs=4", "optimizer.lr=3e-4", "train.epochs=5", "evaluate.ks=[5, 10]"])
    assert config.train.epochs == 5
    assert config.optimizer.lr == 3e-4
    assert config.evaluate.ks == (5, 10)
    assert load_config(path, ["train.epochs=", "train.steps=7"]).train.epochs is None


@pytest.mark.parametrize("overrides", [["model=sasrec"], {"model": "sasrec"}, ["model.dim=16", "model= 'sasrec'"]])
def test_the_model_is_named_by_the_short_form_of_recipes(recipe, overrides):
    config = load_config(recipe("model: {name: hstu, num_heads: 2}"), overrides)
    assert (config.model.name, config.model.num_heads) == ("sasrec", 2)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epochs", "section.key=value"),
        ("=3", "section.key=value"),
        ("train.=3", "section.key=value"),
        ("trian.epochs=3", "'train.epochs'"),
        ("epochs=3", "unknown key 'epochs' in the override 'epochs=3'. Did you mean 'train.epochs'?"),
        ("train.epoch=3", "Did you mean 'train.epochs'?"),
        ("train.lr=3", "Did you mean 'optimizer.lr'?"),
        ("trian.seed=3", "Did you mean 'train.seed'?"),
        ("learning-rate=3", "Did you mean 'optimizer.lr'?"),
        ("batch_size=3", "Did you mean 'data.batch_size' or 'evaluate.batch_size'?"),
        ("hidden_size=3", "Did you mean 'model.dim'?"),
        ("model=3", "'model' to 3: it is a section. Did you mean 'model.name=3'?"),
        ("optimizer=adagrad", "it is a section. Its keys: lr,"),
        ("train.elephant=3", "unknown key 'train.elephant' in the override 'train.elephant=3'. Known keys: epochs,"),
        ("elephant=3", "'elephant=3'. Known keys: version, plugins, task, model,"),
        ("tables.item.dims=3", "unknown key 'dims'"),
        ("evaluate.ks=10", "takes a list such as [10], got 10"),
        ("train.epochs.more=3", "'epochs' is a value, not a section"),
        ("train.epochs=[", "cannot read the value '['"),
        ("train=3", "cannot set 'train' to 3: it is a section."),
    ],
)
def test_a_bad_override_says_so(recipe, override, words):
    with pytest.raises(UserError) as caught:
        load_config(recipe("train: {epochs: 3}"), [override])
    assert words in str(caught.value)


def _values(hint):
    """Values that a field of this type may take, before the checks of ranges."""
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{key: _values(value) for key, value in typing.get_type_hints(hint).items()})
    if typing.get_origin(hint) is dict:
        return st.dictionaries(_values(str), _values(typing.get_args(hint)[1]), max_size=3)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    options = [a for a in typing.get_args(hint) if a is not type(None)]
    if type(None) in typing.get_args(hint):
        return st.none() | _values(options[0])
    if typing.get_origin(hint) is tuple:
        size = {} if Ellipsis in options else {"min_size": len(options), "max_size": len(options)}
        return st.lists(_values(options[0]), **size).map(tuple)
    return {
        int: st.integers(-(2**53), 2**53),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"])),
    }[hint]


def _configs():
    hints = typing.get_type_hints(Config)
    return st.builds(
        Config, **{f.name: _values(hints[f.name]) for f in dataclasses.fields(Config) if not f.metadata.get("derived")}
    )


@given(_configs())
@example(Config(train=TrainConfig(device="\x85\u2028é")))  # YAML folds such line breaks unless they are escaped
def test_what_is_dumped_is_what_is_loaded(config):
    assert parse(Config, yaml.safe_load(dump_config(config)), "dump") == config


def test_a_dumped_config_starts_the_same_run(recipe):
    config = resolve(Config(), num_items=500, num_sequences=6000, typical_length=40, longest_length=90)
    assert load_config(recipe(dump_config(config))) == config


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("typical", "longest", "max_len"),
    [(1, 1, 2), (3, 9, 9), (3, 100, 16), (16, 100, 16), (17, 100, 32), (300, 10_000, 512), (9_000, 10_000, 512)],
)
def test_the_length_follows_from_the_data(typical, longest, max_len):
    resolved = resolve(Config(), num_items=10, num_sequences=6000, typical_length=typical, longest_length=longest)
    assert resolved.model.max_len == max_len


def test_everything_unset_is_resolved_and_what_is_set_stays(recipe):
    resolved = resolve(Config(), num_items=200_000, num_sequences=6000, typical_length=40, longest_length=90)
    assert (resolved.model.dim, resolved.model.qk_dim, resolved.model.v_dim) == (128, 128, 128)
    assert resolved.optimizer.table_lr == resolved.optimizer.lr
    assert resolved.data.batch_size == 128
    config = load_config(recipe("model: {dim: 30, max_len: 7, qk_dim: 5, num_heads: 2}\ndata: {batch_tokens: 99}"))
    resolved = resolve(config, num_items=200_000, num_sequences=6000, typical_length=40, longest_length=90)
    assert (resolved.model.dim, resolved.model.max_len, resolved.model.qk_dim, resolved.model.v_dim) == (30, 7, 5, 15)
    assert (resolved.data.batch_size, resolved.data.batch_tokens) == (None, 99)


def test_an_unset_width_fits_the_heads(recipe):
    config = load_config(recipe("model: {num_heads: 3}"))
    resolved = resolve(config, num_items=10, num_sequences=6000, typical_length=40, longest_length=90)
    assert resolved.model.dim == 66
    assert resolved.model.v_dim == 22


@pytest.mark.parametrize("num_sequences", [1, 100, 600, 6_000, 1_000_000])
def test_an_open_duration_follows_from_the_data(num_sequences):
    recipe = Config(
        optimizer=OptimizerConfig(warmup_steps=None),
        evaluate=EvaluateConfig(every=None),
        train=TrainConfig(epochs=None),
    )
    config = resolve(recipe, num_items=500, num_sequences=num_sequences, typical_length=40, longest_length=90)
    batches = -(-num_sequences // config.data.batch_size)
    steps = batches * config.train.epochs
    assert 16 <= config.data.batch_size <= 128
    assert 5 <= config.train.epochs <= 200
    assert steps >= 1000 or config.train.epochs == 200
    assert config.optimizer.warmup_steps <= min(100, 0.05 * steps)
    assert 1 <= config.evaluate.every <= max(1, config.train.epochs // 10)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.sampler=mixture"], "needs loss.shares"),
        (["loss.shares=[0.5,0.5,0,0]"], "need loss.sampler=mixture"),
        (["loss.sampler=mixture", "loss.shares=[0.5,0.4,0,0]"], "must add up to 1"),
        (["loss.sampler=mixture", "loss.shares=[1.5,-0.5,0,0]"], "must not be negative"),
        (["loss.sampler=mixture", "loss.shares=[0,0,0,1]"], "hard negatives alone"),
        (["loss.sampler=mixture", "loss.shares=[0.999,0.001,0,0]"], "gives popularity 0.001 of 128 negatives"),
        (["loss.sampler=mixture", "loss.shares=[0.5,0.5]"], "list of 4"),
        (["loss.sampler=popularty"], "Did you mean 'popularity'"),
        (["loss.sharing=positions"], "set loss.expansion=2"),
        (["loss.sharing=logits", "loss.expansion=2", "loss.segment_mb=8"], "unset loss.segment_mb"),
        (["loss.expansion=0"], "loss.expansion must be positive"),
        (["loss.segment_mb=0"], "loss.segment_mb must be positive"),
        (["loss.hard_every=10"], "loss.hard_every must be at least 64"),
        (["loss.precision=bf16"], "choose from fp32, fp16, int8"),
        (
            ["loss.sampler=mixture", "loss.shares=[0.5,0,0,0.5]", "pipeline.depth=100"],
            "pipeline.depth 100 draws batches earlier",
        ),
        (
            ["loss.sampler=mixture", "loss.shares=[0.5,0,0,0.5]", "pipeline.mode=semi_async", "pipeline.staleness=63"],
            "pipeline.staleness 63 has 65 batches in flight and draws them earlier than hard negatives are known; "
            "set it to 62 or less",
        ),
    ],
)
def test_senseless_losses_name_the_remedy(overrides: list[str], message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: hstu}\n")
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(recipe, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["pipeline.mode=semi_async", "pipeline.staleness=62"],
        ["pipeline.mode=semi_async", "pipeline.staleness=63", "pipeline.depth=64"],
        ["pipeline.mode=sync", "pipeline.staleness=100"],
    ],
)
def test_hard_negatives_go_with_as_much_ahead_as_their_delay(overrides: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: hstu}\n")
    config = load_config(recipe, ["loss.sampler=mixture", "loss.shares=[0.5,0,0,0.5]", *overrides])
    assert all(config.pipeline.depth_on(num_ranks) <= HARD_DELAY for num_ranks in (1, 2))


def test_a_key_of_an_earlier_release_works_with_a_note(recipe):
    old = recipe("parallel: {wire: fp16}")
    with pytest.warns(Note, match=r"parallel\.wire is now parallel\.row_precision; the old name still works") as noted:
        assert load_config(old).parallel.row_precision == "fp16"
    assert len(noted) == 1
    new = recipe("parallel: {row_precision: fp16}")
    with pytest.warns(Note, match=r"parallel\.wire is now"):
        assert load_config(new, ["parallel.wire=bf16"]).parallel.row_precision == "bf16"
    with pytest.raises(UserError, match=r"has both parallel\.wire and parallel\.row_precision.*remove parallel\.wire"):
        load_config(recipe("parallel: {wire: fp16, row_precision: fp32}"))


def test_a_stored_run_has_old_keys_without_a_note(recipe, tmp_path, recwarn):
    recipe("parallel: {wire: fp16}").rename(tmp_path / "config.yaml")
    assert load_run_config(tmp_path).parallel.row_precision == "fp16"
    assert not recwarn.list


@pytest.mark.parametrize(("old", "now"), [("fuxi-gamma", "fuxi"), ("fuxi-beta", "fuxi-beta-days"), ("hstu", "hstu")])
def test_a_config_without_a_version_keeps_the_meaning_of_its_model(tmp_path: Path, old: str, now: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{name: {old}}}\n")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        config = load_config(recipe)
    assert (config.model.name, config.version) == (now, VERSION)
    assert [f"its model '{old}' is what is called '{now}' now" in str(note.message) for note in notes] == [
        True for _ in ({old} - {now})
    ]
    recipe.write_text(dump_config(config))
    assert load_config(recipe) == config
    recipe.write_text(f"version: 2\nmodel: {{name: {old}}}\n")
    assert load_config(recipe).model.name == old


def test_what_is_set_on_the_command_line_has_today_s_meaning(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: hstu}\n")
    assert load_config(recipe, ["model.name=fuxi-gamma"]).model.name == "fuxi-gamma"


def test_a_stored_config_of_before_is_opened_without_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: fuxi-beta}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_run_config(tmp_path).model.name == "fuxi-beta-days"


@pytest.mark.parametrize("version", ["3", "0", "-1"])
def test_a_version_that_is_not_known_is_refused(tmp_path: Path, version: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: {version}\n")
    with pytest.raises(UserError, match=f"the config is of version {version}; this TurboGR reads versions 1 to 2"):
        load_config(recipe)
