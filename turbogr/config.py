"""Strict, frozen configs: what a run is, in full.

A recipe is YAML with one section per class below. Every key is known and typed: a misspelt key or a value of the wrong
type is an error that names the nearest key. `None` means "from the data" (or "off" where the field says so);
`resolve` replaces what depends on the data, and the result is stored with the run and can be started again.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from turbogr.errors import UserError, nearest

_T = TypeVar("_T")


PRESETS: dict[str, dict[str, int]] = {
    size: {
        "dim": dim,
        "num_blocks": num_blocks,
        "num_heads": 8,
        "max_len": max_len,
        "max_distance": 2048,
        "num_time_buckets": 32,
    }
    for size, dim, num_blocks, max_len in (
        ("tiny", 128, 2, 2048),
        ("small", 256, 4, 2048),
        ("medium", 512, 8, 2048),
        ("large", 1024, 16, 2048),
        ("long", 1024, 16, 4096),
    )
}
"""The sizes that TurboGR's paper trains, for every model."""

_DEPTH = 6

_SIZES = {"num_blocks": 2, "num_heads": 1, "num_time_buckets": 128}

MAX_TIME_BUCKETS = 2**16 - 1
"""Most time buckets that attention serves, which keeps the bucket of a pair of events in 16 bits."""


@dataclass(frozen=True)
class ModelConfig:
    """The sequence model. A size that is unset comes from the preset, if there is one, else from the data (dim,
    max_len), dim / num_heads (qk_dim, v_dim) or a default: 2 blocks, 1 head, 128 time buckets.

    `max_distance` distances (unset: max_len) have weights of their own; longer ones share the longest's. The
    feed-forward part of SASRec and FuXi is `ffn_multiplier` · dim wide.
    """

    name: Literal["hstu", "sasrec", "fuxi-alpha", "fuxi-beta", "fuxi-gamma"] = "hstu"
    preset: Literal["tiny", "small", "medium", "large", "long"] | None = None
    dim: int | None = None
    num_blocks: int | None = None
    num_heads: int | None = None
    qk_dim: int | None = None
    v_dim: int | None = None
    max_len: int | None = None
    max_distance: int | None = None
    num_time_buckets: int | None = None
    ffn_multiplier: float = 1.0
    dropout: float = 0.2

    def check(self) -> None:
        sizes = ("dim", "num_blocks", "num_heads", "qk_dim", "v_dim", "max_len", "max_distance", "num_time_buckets")
        _positive(self, *sizes, "ffn_multiplier")
        _between(self, 1, MAX_TIME_BUCKETS, "num_time_buckets")
        _between(self, 0.0, 1.0, "dropout")
        if self.dropout >= 1.0:
            raise UserError(f"model.dropout must be below 1, got {self.dropout}")
        sized = self.with_preset()
        assert sized.num_heads is not None
        if sized.dim is not None and sized.dim % sized.num_heads and None in (self.qk_dim, self.v_dim):
            raise UserError(
                f"model.dim {sized.dim} does not divide into model.num_heads {sized.num_heads}; "
                "change one of them or set model.qk_dim and model.v_dim"
            )

    def with_preset(self) -> ModelConfig:
        """Return a copy in which the preset and the defaults fill what is unset and does not depend on the data."""
        preset = {} if self.preset is None else PRESETS[self.preset]
        given = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        filled = {**_SIZES, **preset, **given}
        if "dim" in filled:
            head_dim = filled["dim"] // filled["num_heads"]
            filled = {"qk_dim": head_dim, "v_dim": head_dim, **filled}
        return ModelConfig(**filled)

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward part."""
        assert self.dim is not None, "resolve the config first"
        return max(1, round(self.ffn_multiplier * self.dim))


HARD_DELAY = 64
"""Steps after which lists of hard negatives come into use, so that batches may be drawn so many steps ahead."""


@dataclass(frozen=True)
class LossConfig:
    """Sampled softmax over unit vectors, against `num_negatives` items drawn for every position.

    `popularity` draws an item by its number of training events to the power `popularity_exponent`, `in-batch` the
    targets of other positions; both are corrected for by log Q. A `mixture` takes `shares` of uniform, popularity,
    in-batch and hard, which add up to 1; hard are the `hard_size` items closest to the target, looked up every
    `hard_every` steps and used from 64 steps later.

    With `expansion` k each position counts k · num_negatives. `sharing: group` lets k consecutive positions draw that
    many together, `positions` adds negatives of the sequence's other positions, `logits` adds those positions' logits.

    `precision` is that of the negatives' vectors. `segment_mb` computes the loss in segments of positions that take
    about so many megabytes besides the rows, however many negatives there are (unset: in one piece); beside a single
    accelerator the item table then lives in host memory.
    """

    num_negatives: int = 128
    temperature: float = 0.05
    sampler: Literal["uniform", "popularity", "in-batch", "mixture"] = "uniform"
    popularity_exponent: float = 0.75
    shares: tuple[float, float, float, float] | None = None
    hard_size: int = 64
    hard_every: int = 1000
    expansion: int = 1
    sharing: Literal["group", "positions", "logits"] = "group"
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    segment_mb: float | None = None

    def check(self) -> None:
        _positive(self, "num_negatives", "temperature", "hard_size", "hard_every", "expansion", "segment_mb")
        _between(self, 0.0, math.inf, "popularity_exponent")
        _between(self, HARD_DELAY, math.inf, "hard_every")
        self._check_shares()
        if self.expansion == 1 and self.sharing != "group":
            raise UserError(
                f"loss.sharing '{self.sharing}' does nothing at loss.expansion 1; set loss.expansion=2 or more"
            )
        if self.sharing == "logits" and self.segment_mb is not None:
            raise UserError(
                "loss.sharing 'logits' keeps all logits of a batch and cannot be computed in segments; "
                "unset loss.segment_mb, or use loss.sharing=group"
            )

    def _check_shares(self) -> None:
        if (self.shares is None) == (self.sampler == "mixture"):
            raise UserError(
                "loss.sampler 'mixture' needs loss.shares, of uniform, popularity, in-batch and hard; "
                "set e.g. loss.shares=[0.5,0.5,0,0]"
                if self.shares is None
                else f"loss.shares {list(self.shares)} need loss.sampler=mixture, got '{self.sampler}'"
            )
        if self.shares is None:
            return
        if min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise UserError(f"loss.shares must not be negative and must add up to 1, got {list(self.shares)}")
        if self.shares[3] > 1 - 1e-6:
            raise UserError("loss.shares has hard negatives alone, which teach nothing of all other items; add uniform")
        for name, share in self.parts():
            if 0 < share * self.num_negatives < 1:
                raise UserError(
                    f"loss.shares gives {name} {share:g} of {self.num_negatives} negatives, less than one; "
                    "raise the share or loss.num_negatives, or set the share to 0"
                )

    def parts(self) -> list[tuple[str, float]]:
        """The shares of a mixture by the sampler's name."""
        return list(zip(("uniform", "popularity", "in-batch", "hard"), self.shares or (), strict=False))

    def has_hard(self) -> bool:
        """Whether some negatives are hard."""
        return self.shares is not None and self.shares[3] > 0

    def draws_from_batch(self) -> bool:
        """Whether some negatives are other positions' targets."""
        return self.sampler == "in-batch" or (self.shares is not None and self.shares[2] > 0)

    @property
    def num_scored(self) -> int:
        """Negatives that a position is scored against."""
        return self.num_negatives * (1 if self.sharing == "logits" else self.expansion)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for the dense parameters, a row-wise optimiser for the item table.

    `table_lr` unset is `lr`. `warmup_steps` rise linearly (unset: 5 % of the steps, at most 100); `schedule` then runs
    to the end of training, down to `final_lr_fraction` of the rate. `clip_norm` bounds the norm of all gradients
    together; unset is off.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    table: Literal["adam", "adagrad"] = "adam"
    table_lr: float | None = None
    warmup_steps: int | None = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    final_lr_fraction: float = 0.0
    clip_norm: float | None = None

    def check(self) -> None:
        _positive(self, "lr", "eps", "table_lr", "clip_norm")
        _between(self, 0.0, math.inf, "weight_decay", "warmup_steps")
        _between(self, 0.0, 1.0, "final_lr_fraction")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optimizer.betas must lie in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True)
class DataConfig:
    """How the store becomes batches.

    A batch is `batch_size` sequences or at most `batch_tokens` tokens; with neither, 128 sequences. `window: last` uses
    the last max_len events of a long user, `split` cuts a long user into consecutive windows. `split` overrides the
    rule in the store's manifest.

    On several ranks this is the batch of all of them together.
    """

    batch_size: int | None = None
    batch_tokens: int | None = None
    window: Literal["last", "split"] = "last"
    split: str | None = None

    def check(self) -> None:
        _positive(self, "batch_size", "batch_tokens")
        if self.batch_size is not None and self.batch_tokens is not None:
            raise UserError(
                f"set one of data.batch_size ({self.batch_size}) and data.batch_tokens ({self.batch_tokens}), not both"
            )


@dataclass(frozen=True)
class EvaluateConfig:
    """Which held-out part selects the best checkpoint, by which metric, and how often it is looked at.

    `part` unset is the validation item where the split has one, else the test item. `every` counts epochs
    (unset: about ten evaluations in all); `patience` counts evaluations without a better value before training stops
    early (unset: never). With `filter_seen` the items of a user's earlier events are no candidates, and a held-out item
    that is one of them counts as missed; a log in which people return to the same items may want it false. `batch_size`
    bounds the users evaluated together (unset: from the catalogue); metrics do not depend on it.
    """

    part: Literal["valid", "test"] | None = None
    ks: tuple[int, ...] = (10, 50, 200)
    metric: str = "ndcg@10"
    every: int | None = 1
    patience: int | None = None
    filter_seen: bool = True
    batch_size: int | None = None

    def check(self) -> None:
        _positive(self, "every", "patience", "batch_size")
        if not self.ks or any(k < 1 for k in self.ks):
            raise UserError(f"evaluate.ks must be positive cut-offs such as [10, 50, 200], got {list(self.ks)}")
        known = ["mrr", *(f"{name}@{k}" for name in ("hr", "ndcg") for k in self.ks)]
        if self.metric not in known:
            raise UserError(
                f"evaluate.metric '{self.metric}' is not measured; choose from {', '.join(known)}."
                f"{nearest(self.metric, known)}"
            )


@dataclass(frozen=True)
class TrainConfig:
    """How long and on what. Training ends after `epochs` or `steps`, whichever comes first; one may be unset.

    With both unset, epochs follow from the data: about a thousand steps, but at least 5 and at most 200 epochs.

    `checkpoint_every` counts steps between checkpoints besides those after each evaluation (unset: only those).
    `keep_checkpoints` is how many of the newest stay; the best one always does.
    `recompute` keeps the inputs of the blocks alone for the backward pass and computes what is inside them once more:
    the same weights with a fraction of the memory, in about a third more time.
    `profile` times a few early steps on a CPU by operator, for the report; it costs about a millisecond a step.
    `timeline` is what is kept of when every stage ran: `last` the newest few hundred steps of the first rank, `all`
    every step of every rank, about 110 bytes a stage, in the folder timeline.
    """

    epochs: int | None = 20
    steps: int | None = None
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    backend: Literal["auto", "reference", "cpu"] = "auto"
    recompute: bool = False
    log_every: int = 10
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    tensorboard: bool = True
    profile: bool = True
    timeline: Literal["last", "all"] = "last"

    def check(self) -> None:
        _positive(self, "epochs", "steps", "threads", "log_every", "checkpoint_every", "keep_checkpoints")


@dataclass(frozen=True)
class ParallelConfig:
    """How several ranks share the work; without effect on one. `parallel: auto` leaves everything to the defaults.

    `groups` × `members` is the number of ranks: each group holds the whole item table, sharded over its members. Unset
    follows from the topology: the ranks of one machine form a group, or those of as few machines as hold the table.
    `wire` is the precision in which item vectors and their gradients travel. Every `check_every` steps copies of the
    same weights are compared (unset: never). A rank that shows no sign of life for `timeout` seconds, because its
    process is stopped or its machine is gone, is named and ends the job (unset: never); one that dies does so at once.

    `balance` says how ranks share the sequences of a batch: `none` equally many each, `token-budget` (with
    `data.batch_tokens`) equally many tokens, `reallocate` equal cost; `auto` chooses by the lengths. It changes the
    speed, never the result. A sequence of n tokens costs a·n + b·n²; `cost` is [a, b], in any unit (unset: measured
    when the run starts, and stored with it). `speeds` has a number per rank where devices are not equally fast.
    """

    groups: int | None = None
    members: int | None = None
    wire: Literal["fp32", "fp16", "bf16"] = "fp32"
    check_every: int | None = 100
    timeout: float | None = 60.0
    balance: Literal["auto", "none", "token-budget", "reallocate"] = "auto"
    cost: tuple[float, float] | None = None
    speeds: tuple[float, ...] | None = None

    def check(self) -> None:
        _positive(self, "groups", "members", "check_every", "timeout")
        if self.cost is not None and not (min(self.cost) >= 0 and max(self.cost) > 0):
            raise UserError(
                f"parallel.cost must be two numbers [a, b], not negative and not both 0, got {list(self.cost)}"
            )
        if self.speeds is not None and not (self.speeds and min(self.speeds) > 0):
            raise UserError(f"parallel.speeds must be a positive number for every rank, got {list(self.speeds)}")


@dataclass(frozen=True)
class PipelineConfig:
    """Which work of later batches runs while a batch computes.

    `mode` decides what look-ups in the item table see: in `sync` every earlier update; in `semi_async` all but those of
    the last `staleness` batches; in `exact_overlap` every earlier update again, with the same weights as `sync`, by
    holding back only the rows that consecutive batches share. `depth` is how many batches are in flight, from being
    loaded to being learnt (unset: 1, nothing early, for `sync` on one rank, else 6, and of `semi_async` staleness + 2
    if that is more).
    """

    mode: Literal["sync", "semi_async", "exact_overlap"] = "sync"
    depth: int | None = None
    staleness: int = 1

    def check(self) -> None:
        _positive(self, "depth", "staleness")
        needed = {"sync": 1, "semi_async": self.staleness + 1, "exact_overlap": 2}[self.mode]
        if self.depth is not None and self.depth < needed:
            raise UserError(
                f"pipeline.depth {self.depth} is too small for pipeline.mode '{self.mode}', which has {needed} batches "
                f"in flight; set it to {needed} or more, or leave it out"
            )

    def depth_on(self, num_ranks: int) -> int:
        """Return how many batches are in flight on a number of ranks."""
        if self.depth is not None:
            return self.depth
        if self.mode == "semi_async":
            return max(_DEPTH, self.staleness + 2)
        return 1 if self.mode == "sync" and num_ranks == 1 else _DEPTH


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def check(self) -> None:
        """Raise UserError for values that make no sense, alone or together."""
        for section in dataclasses.fields(self):
            getattr(self, section.name).check()
        self._check_hard()
        if self.parallel.balance == "token-budget" and self.data.batch_tokens is None:
            raise UserError("parallel.balance 'token-budget' needs data.batch_tokens; set it, or choose 'reallocate'")

    def _check_hard(self) -> None:
        pipeline = self.pipeline
        depth = pipeline.depth_on(1)  # of `sync` on many ranks it is larger, but never too large unless it is set
        if not self.loss.has_hard() or depth <= HARD_DELAY:
            return
        if pipeline.depth is not None:
            told, most = f"pipeline.depth {depth} draws batches", HARD_DELAY
        else:
            told = f"pipeline.staleness {pipeline.staleness} has {depth} batches in flight and draws them"
            most = HARD_DELAY - 2
        raise UserError(
            f"{told} earlier than hard negatives are known; set it to {most} or less, "
            "or the hard part of loss.shares to 0"
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply `section.key=value` overrides in order, and check the result.

    Raises:
        UserError: a file that is missing or not YAML, an unknown key, a value of the wrong type or out of range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the recipe {path} is not valid YAML: {' '.join(str(error).split())}") from error
    tree = _as_mapping({} if raw is None else raw, str(path))
    if tree.get("parallel") == "auto":
        tree["parallel"] = {}
    for override in overrides:
        _apply_override(tree, override)
    config = parse(Config, tree, str(path))
    config.check()
    return config


def dump_config(config: Config) -> str:
    """Return YAML from which `load_config` rebuilds the same config."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def parse(cls: type[_T], tree: Mapping[str, Any], where: str) -> _T:
    """Build a config class from nested mappings, strictly; `where` names the place in error messages."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in tree.items():
        if key not in hints:
            raise UserError(
                f"unknown key '{key}' in {where}.{nearest(str(key), names)} Known keys: {', '.join(names)}."
            )
        values[key] = _convert(
            hints[key], value, f"{where}: {key}" if dataclasses.is_dataclass(hints[key]) else key, where
        )
    return cls(**values)


def resolve(config: Config, *, num_items: int, num_sequences: int, typical_length: int, longest_length: int) -> Config:
    """Fill in every size that follows from the data.

    `typical_length` is a high quantile of the users' history lengths: the model's max_len is the next power of two,
    between 16 and 512, and no longer than the longest history. The width grows with the catalogue: 64 up to 100,000
    items, then 128. A batch is 128 sequences, or fewer where an epoch would have less than 40 batches, down to 16.
    """
    model = config.model.with_preset()
    assert model.num_heads is not None
    max_len = model.max_len
    if max_len is None:
        wanted = 2 ** math.ceil(math.log2(max(1, typical_length)))
        max_len = max(2, min(max(16, min(512, wanted)), longest_length))
    dim = model.dim
    if dim is None:
        dim = 64 if num_items <= 100_000 else 128
        dim = math.ceil(dim / model.num_heads) * model.num_heads
    model = dataclasses.replace(
        model,
        max_len=max_len,
        max_distance=min(model.max_distance or max_len, max_len),
        dim=dim,
        qk_dim=model.qk_dim or dim // model.num_heads,
        v_dim=model.v_dim or dim // model.num_heads,
    )
    optimizer = config.optimizer
    if optimizer.table_lr is None:
        optimizer = dataclasses.replace(optimizer, table_lr=optimizer.lr)
    data = config.data
    if data.batch_size is None and data.batch_tokens is None:
        data = dataclasses.replace(data, batch_size=min(128, max(16, 2 ** int(math.log2(max(1, num_sequences / 40))))))
    resolved = dataclasses.replace(config, model=model, optimizer=optimizer, data=data)
    resolved = _resolve_duration(resolved, num_sequences, typical_length)
    resolved.check()
    return resolved


def _resolve_duration(config: Config, num_sequences: int, typical_length: int) -> Config:
    """Fill in how long to train, to warm up and between evaluations."""
    data, train = config.data, config.train
    sequences = data.batch_size or max(1, (data.batch_tokens or 1) // max(1, typical_length))
    batches = math.ceil(num_sequences / sequences)
    if train.epochs is None and train.steps is None:
        train = dataclasses.replace(train, epochs=min(200, max(5, math.ceil(1000 / batches))))
    steps = min(train.steps or math.inf, batches * (train.epochs or math.inf))
    optimizer, evaluate = config.optimizer, config.evaluate
    if optimizer.warmup_steps is None:
        optimizer = dataclasses.replace(optimizer, warmup_steps=min(100, int(0.05 * steps)))
    if evaluate.every is None:
        evaluate = dataclasses.replace(evaluate, every=max(1, int(steps / batches / 10)))
    return dataclasses.replace(config, train=train, optimizer=optimizer, evaluate=evaluate)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"cannot read the override '{override}'; write it as section.key=value, e.g. train.epochs=5")
    node: Any = tree
    for key in keys[:-1]:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise UserError(f"cannot set '{path}': '{key}' is a value, not a section")
    try:
        node[keys[-1]] = yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError as error:
        raise UserError(f"cannot read the value in the override '{override}'") from error


def _convert(hint: Any, value: Any, key: str, where: str) -> Any:
    """Convert a YAML value to the type of a field, or raise with the key and what it takes."""
    if dataclasses.is_dataclass(hint):
        return parse(typing.cast(type, hint), _as_mapping({} if value is None else value, key), key)
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None:
            return None
        return _convert(options[0], value, key, where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(
                f"{where}: {key} is '{value}'; choose from {', '.join(map(str, choices))}."
                f"{nearest(str(value), choices)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(key, value, "a list", where)
        items = typing.get_args(hint)
        if Ellipsis not in items and len(items) != len(value):
            raise _wrong_type(key, value, f"a list of {len(items)}", where)
        return tuple(_convert(items[0], item, key, where) for item in value)
    return _convert_scalar(hint, value, key, where)


def _convert_scalar(hint: type, value: Any, key: str, where: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    if hint is float and not isinstance(value, bool):
        # YAML reads 1e-3 as text; only 1.0e-3 is a number to it
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    kinds = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    raise _wrong_type(key, value, kinds[hint], where)


def _wrong_type(key: str, value: Any, wanted: str, where: str) -> UserError:
    return UserError(f"{where}: {key} takes {wanted}, got {value!r}")


def _as_mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping of keys to values, got {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    """Tuples become lists, which YAML can write without tags."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise UserError(f"{_section_name(section)}.{name} must be positive, got {value}")


def _between(section: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise UserError(f"{_section_name(section)}.{name} must be {bounds}, got {value}")


def _section_name(section: Any) -> str:
    return type(section).__name__.removesuffix("Config").lower()
