"""`turbogr.train` on tables in memory: no folders to name, and a recommender comes back."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import turbogr
from tests.stores import draw_histories
from turbogr import machine
from turbogr.config import Config, load_config, with_overrides
from turbogr.config.override_texts import override_texts
from turbogr.errors import UserError
from turbogr.recommend import Recommender
from turbogr.training.trainer import TrainResult

TINY: dict[str, Any] = {
    "model": {"dim": 8, "num_blocks": 1, "num_heads": 1, "max_len": 8},
    "loss.num_negatives": 4,
    "data.batch_size": 16,
    "train": {"epochs": 2, "tensorboard": False},
}


@pytest.fixture(autouse=True)
def options_as_written() -> None:
    """These tests are Python callers."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def events(seed: int = 1) -> pd.DataFrame:
    histories = draw_histories(seed, 40, 12, shortest=4)
    rows = [(f"u{u}", f"i{i}", 10**9 + 60 * n) for u, history in enumerate(histories) for n, i in enumerate(history)]
    return pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "temporary").glob("turbogr-*"))


def test_a_table_becomes_a_recommender_in_one_call(tmp_path: Path) -> None:
    model = turbogr.train(events(), overrides=TINY)
    assert isinstance(model, Recommender)
    assert model.result is not None and model.result.status == "finished"
    assert model.run.is_dir() and str(model.run) in repr(model)
    found = model.recommend(pd.DataFrame({"user_id": ["u3", "u1"]}), k=4)
    assert found["user_id"].tolist() == ["u3"] * 4 + ["u1"] * 4
    assert set(found["item_id"]) <= {f"i{row}" for row in range(12)}
    measured = model.evaluate()
    assert measured.metrics["hr@10"] == model.metrics["hr@10"]
    assert set(model.metrics) >= set(measured.metrics)
    assert len(left(tmp_path)) == 1
    run = model.run
    del model
    gc.collect()
    assert left(tmp_path) == [] and not run.exists()


def test_save_keeps_all_of_it(tmp_path: Path) -> None:
    model = turbogr.train(events(), overrides=TINY)
    wanted = model.recommend(["u3", "u1"], k=4)
    assert model.save(tmp_path / "kept" / "mine") == tmp_path / "kept" / "mine"
    with pytest.raises(UserError, match="already exists; save to another folder"):
        model.save(tmp_path / "kept" / "mine")
    del model
    gc.collect()
    again = turbogr.load(tmp_path / "kept" / "mine")
    assert again.recommend(["u3", "u1"], k=4) == wanted
    assert turbogr.evaluate(again.run).metrics["hr@10"] == again.metrics["hr@10"]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["mine"]


def test_the_run_is_where_the_caller_says(tmp_path: Path) -> None:
    model = turbogr.train(events(), out=tmp_path / "run", overrides=TINY)
    assert model.run == tmp_path / "run"
    assert left(tmp_path) == [], "the temporary store is gone, and the run has its copy"
    assert model.store.path == tmp_path / "run" / "data"
    longer = {**TINY, "train": {"epochs": 3, "tensorboard": False}}
    with pytest.raises(UserError, match="already exists; choose another out=, continue it with resume=True"):
        turbogr.train(events(), out=tmp_path / "run", overrides=longer)
    continued = turbogr.train(events(), out=tmp_path / "run", overrides=longer, resume=True)
    assert continued.result is not None and model.result is not None
    assert continued.result.step > model.result.step
    with pytest.raises(UserError, match="holds other data"):
        turbogr.train(events(2), out=tmp_path / "run", overrides=longer, resume=True)


@pytest.mark.parametrize("kind", ["polars", "arrow"])
def test_other_kinds_of_tables_and_named_columns(kind: str) -> None:
    table = events().rename(columns={"user_id": "who", "item_id": "what", "timestamp": "when"})
    given = pl.from_pandas(table) if kind == "polars" else pa.Table.from_pandas(table)
    names = {"user_column": "who", "item_column": "what", "time_column": "when"}
    model = turbogr.train(given, recipe="quickstart", overrides=TINY, min_user_events=5, **names)
    assert model.store.num_users == (table.groupby("who").size() >= 5).sum()
    wanted = model.recommend(table[table["who"] == "u3"], k=3)
    assert wanted["user_id"].tolist() == ["u3"] * 3, "columns are called as in the log"
    with pytest.raises(UserError, match="name them with user_column=, item_column= and time_column="):
        turbogr.train(given)


def test_the_calls_of_0_1_0_return_the_result(tmp_path: Path) -> None:
    turbogr.prepare(events(), tmp_path / "data")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("evaluate: {metric: hr@10}")
    one = turbogr.train(recipe, tmp_path / "data", tmp_path / "one", overrides=override_texts(TINY))
    two = turbogr.train(recipe=str(recipe), data=str(tmp_path / "data"), out=str(tmp_path / "two"), overrides=TINY)
    three = turbogr.train(load_config(recipe, TINY), tmp_path / "data", tmp_path / "three")
    four = turbogr.train(load_config(recipe), tmp_path / "data", tmp_path / "four", overrides=TINY)
    assert all(type(result) is TrainResult for result in (one, two, three, four))
    assert {(result.status, result.step, result.best_value) for result in (one, two, three, four)} == {
        ("finished", one.step, one.best_value)
    }


def test_a_prepared_store_without_a_run_folder(tmp_path: Path) -> None:
    store = turbogr.prepare(events(), out=tmp_path / "data")
    model = turbogr.train(store, overrides=TINY)
    assert model.store.path == store.path
    other = turbogr.train("quickstart", tmp_path / "data", overrides=TINY)
    assert other.recommend(["u1"]) == model.recommend(["u1"])
    named = turbogr.train(data=tmp_path / "data", out=tmp_path / "run", overrides=TINY)
    assert isinstance(named, Recommender) and named.run == tmp_path / "run"


def test_an_interrupted_training_returns_the_model_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    from turbogr.training.trainer import Trainer

    step = Trainer.step

    def interrupting(self: Trainer, *args: Any) -> Any:
        if self.progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", interrupting)
    with pytest.warns(UserWarning, match="training was interrupted after step .*; this is the model so far"):
        model = turbogr.train(events(), out=tmp_path / "run", overrides=TINY)
    assert model.result is not None and model.result.status == "interrupted"
    assert len(model.recommend("u1", k=3)) == 3


def test_nothing_is_left_when_training_fails(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown key"):
        turbogr.train(events(), overrides={"train.epoch": 3})
    with pytest.raises(UserError, match="no column looks like"):
        turbogr.train(pd.DataFrame({"a": [1]}))
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda table: turbogr.train(), "nothing to train on; .* name a prepared store with data="),
        (lambda table: turbogr.train("quickstart"), "nothing to train on"),
        (lambda table: turbogr.train(table, "runs/x"), "name what follows: recipe=..., out=..."),
        (lambda table: turbogr.train(table, data=table), "data is given twice"),
        (lambda table: turbogr.train(table, overrides="train.epochs=3"), "overrides is 'train.epochs=3'; give a dict"),
        (lambda table: turbogr.train("quickstart", "data", user_column="u"), "user_column: options of prepare go with"),
        (lambda table: turbogr.prepare(table), "no folder to write to; name it with out="),
        (lambda table: turbogr.prepare(table, ["a.csv"], "out"), "a table in memory has no paths"),
        (lambda table: turbogr.prepare([1], out="out"), "expected the name of a source or a pandas, .* got list"),
    ],
)
def test_mistakes_are_pointed_out(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(events())


def test_several_ranks_cannot_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"prepare it once with `turbogr.prepare\(\)`, and give .* data="):
        turbogr.train(events())


def test_overrides_as_a_dict() -> None:
    nested = {"train": {"epochs": 3, "seed": np.int64(5)}, "optimizer.lr": 1e-5, "model": {"name": "hstu"}}
    texts = ["train.epochs=3", "train.seed=5", "optimizer.lr=1e-05", 'model.name="hstu"']
    assert override_texts(nested) == texts
    config = load_config("quickstart", nested)
    assert config == load_config("quickstart", texts)
    assert (config.train.epochs, config.train.seed, config.optimizer.lr) == (3, 5, 1e-5)
    more = {"evaluate.ks": (5, 10), "train.epochs": None, "model.name": "sasrec", "tables": {"item": {"dim": 4}}}
    changed = load_config("quickstart", more)
    assert changed.evaluate.ks == (5, 10) and changed.train.epochs is None and changed.model.name == "sasrec"
    assert with_overrides(Config(), {}) == Config()
    assert with_overrides(load_config("quickstart"), nested) == config
    with pytest.raises(UserError, match=r"lr is <object"):
        override_texts({"optimizer.lr": object()})
    with pytest.raises(UserError, match=r"Did you mean 'train.epochs'"):
        with_overrides(Config(), {"epochs": 3})


def test_a_temporary_run_is_gone_when_the_program_ends(tmp_path: Path) -> None:
    events().to_csv(tmp_path / "log.csv", index=False)
    code = (
        "import pandas as pd, turbogr\n"
        f"model = turbogr.train(pd.read_csv({str(tmp_path / 'log.csv')!r}), overrides={TINY!r})\n"
        "print(model.run)"
    )
    environment = {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(Path(turbogr.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(tmp_path / "temporary"))
    assert not Path(ended.stdout.strip()).exists() and left(tmp_path) == []
