"""The sections of a config: what a run is, in full, as frozen dataclasses.

A recipe is YAML with one section per class below. Every key is known and typed: a misspelt key or a value of the wrong
type is an error that names the nearest key. `None` means "from the data" (or "off" where the field says so);
`resolve` replaces what depends on the data, and the result is stored with the run and can be started again. What is
chosen by name (a block, a mask, a loss, ...) is looked up in the registry of `turbogr.plugins`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from turbogr import plugins as registry
from turbogr.config.bounds import between, positive
from turbogr.errors import UserError, did_you_mean

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

VERSION = 2
"""Of the schema: what a name in a config means. 2: `fuxi-beta` and `fuxi-gamma` are their authors'; before, and in
configs without a version, they were what is `fuxi-beta-days` and `fuxi` now."""

_DEPTH = 6

_SIZES = {"num_blocks": 2, "num_heads": 1, "num_time_buckets": 128}

MAX_TIME_BUCKETS = 2**16 - 1
"""Most time buckets that attention serves, which keeps the bucket of a pair of events in 16 bits."""


@dataclass(frozen=True)
class ModelConfig:
    """The sequence model: `name` is its block, `mask` which earlier events a position sees. A size that is unset comes
    from the preset, if there is one, else from the data (dim, max_len), dim / num_heads (qk_dim, v_dim) or a default:
    2 blocks, 1 head, 128 time buckets.

    `name` may also be a simple method, such as `ease` (`model: ease` for short), which has none of these settings.

    `max_distance` distances (unset: max_len) have weights of their own; longer ones share the longest's. The
    feed-forward part of SASRec and FuXi is `ffn_multiplier` · dim wide.
    """

    name: str = field(default="hstu", metadata={"kind": "block"})
    mask: str = field(default="causal", metadata={"kind": "mask"})
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
        positive(self, *sizes, "ffn_multiplier")
        between(self, 1, MAX_TIME_BUCKETS, "num_time_buckets")
        between(self, 0.0, 1.0, "dropout")
        if self.dropout >= 1.0:
            raise UserError(f"model.dropout must be below 1, got {self.dropout}")
        sized = self.with_preset()
        assert sized.num_heads is not None
        if sized.dim is not None and sized.dim % sized.num_heads and None in (self.qk_dim, self.v_dim):
            raise UserError(
                f"model.dim {sized.dim} does not divide into model.num_heads {sized.num_heads}; "
                "change one of them or set model.qk_dim and model.v_dim"
            )

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a config is a value, and this is asked for in every step
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
    """Logits are cosines divided by `temperature`. `name` is the loss: softmax or binary cross-entropy (`bce`, `gbce`)
    against `num_negatives` items drawn for every position, or `full-softmax` against all items.

    `popularity` draws an item by its number of training events to the power `popularity_exponent`, `in-batch` the
    targets of other positions; both are corrected for by log Q. A `mixture` takes `shares` of uniform, popularity,
    in-batch and hard, which add up to 1; hard are the `hard_size` items closest to the target, looked up every
    `hard_every` steps and used from 64 steps later.

    With `expansion` k each position is compared with k · num_negatives items. `sharing` says where they come from:
    `group`: k consecutive positions draw that many together; `positions`: a position takes the others from positions
    of its sequence; `batch`: from tokens of any sequence of the batch (on several ranks: of the rank's part of it);
    `logits`: it takes the logits of positions of its sequence.

    `precision` is that of the negatives' vectors. `segment_mb` computes the loss in segments of positions, whose memory
    besides the rows is about that many megabytes for any number of negatives (unset: in one piece). With a single
    accelerator the item table is then in host memory.
    """

    name: str = field(default="sampled-softmax", metadata={"kind": "loss"})
    num_negatives: int = 128
    temperature: float = 0.05
    sampler: str = field(default="uniform", metadata={"kind": "sampler"})
    popularity_exponent: float = 0.75
    shares: tuple[float, float, float, float] | None = None
    hard_size: int = 64
    hard_every: int = 1000
    expansion: int = 1
    sharing: Literal["group", "positions", "batch", "logits"] = "group"
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    segment_mb: float | None = None

    def check(self) -> None:
        positive(self, "num_negatives", "temperature", "hard_size", "hard_every", "expansion", "segment_mb")
        between(self, 0.0, math.inf, "popularity_exponent")
        between(self, HARD_DELAY, math.inf, "hard_every")
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
        positive(self, "lr", "eps", "table_lr", "clip_norm")
        between(self, 0.0, math.inf, "weight_decay", "warmup_steps")
        between(self, 0.0, 1.0, "final_lr_fraction")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optimizer.betas must lie in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True)
class DataConfig:
    """How the store becomes batches.

    A batch is `batch_size` sequences or at most `batch_tokens` tokens; with neither, 128 sequences. `window: last` uses
    the last max_len events of a long user, `split` cuts a long user into consecutive windows. `split` overrides the
    rule in the store's manifest. `repeated_targets: skip` leaves training events whose item the user has had before out
    of the loss; they stay inputs. Unset, they are skipped where `evaluate.filter_seen` leaves seen items out.

    `features: all` uses every feature of the store, `named` those of the section `features`; unset, a ranking model
    uses all of them if none are named. `without_features` are left out. With `cold_items` retrieval gives an item
    without a training event the vector of a known item with similar features; items that are known lose places to it.

    On several ranks this is the batch of all of them together.

    `plan_ranks` plans `plan_window` steps at once, such that within each step this number of ranks finish at the same
    time, also with few sequences per rank. It changes the batches, which then have `batch_size` sequences in the mean;
    they are the same on any number of ranks.
    """

    batch_size: int | None = None
    batch_tokens: int | None = None
    plan_ranks: int | None = None
    plan_window: int = 32
    window: Literal["last", "split"] = "last"
    split: str | None = None
    repeated_targets: Literal["train", "skip"] | None = "train"
    features: Literal["all", "named"] | None = None
    without_features: tuple[str, ...] = ()
    cold_items: bool = False

    def check(self) -> None:
        positive(self, "batch_size", "batch_tokens", "plan_ranks", "plan_window")
        if self.plan_ranks is not None and self.batch_tokens is not None:
            raise UserError(
                f"data.plan_ranks ({self.plan_ranks}) plans batches of sequences; set data.batch_size instead of "
                f"data.batch_tokens ({self.batch_tokens}), or unset data.plan_ranks"
            )
        if self.batch_size is not None and self.batch_tokens is not None:
            raise UserError(
                f"set one of data.batch_size ({self.batch_size}) and data.batch_tokens ({self.batch_tokens}), not both"
            )


@dataclass(frozen=True)
class TableConfig:
    """An embedding table. `rows` and `dim` unset follow from the data and model.dim, `optimizer` and `lr` from
    optimizer.table and optimizer.table_lr."""

    rows: int | None = None
    dim: int | None = None
    optimizer: Literal["adam", "adagrad"] | None = None
    lr: float | None = None


@dataclass(frozen=True)
class FeatureConfig:
    """A feature of events, items or users: the `column` of the store, such as `item.tag` or `tag`, and the `table` in
    which its values are looked up; both unset are the feature's own name.

    `kind`, `owner` and `width` (floats per value) follow from the store.
    """

    column: str | None = None
    table: str | None = None
    kind: Literal["category", "categories", "number", "vector"] | None = None
    owner: Literal["event", "item", "user"] | None = None
    width: int | None = None


@dataclass(frozen=True)
class EvaluateConfig:
    """Which held-out part selects the best checkpoint, by which metric, and how often it is looked at.

    `metric` is one of the task's metrics (unset: the task's choice, NDCG@10 for retrieval) or of the extra `metrics`,
    which are computed beside them. `part` unset is the validation item where the split has one, else the test item.
    `every` counts epochs (unset: about ten evaluations in all); `patience` counts evaluations without a better value
    before training stops early (unset: never), and of these only such that are more than `min_drop` standard errors
    worse than the best one. With `filter_seen` the items of a user's earlier events are no candidates, for metrics and
    for recommendations, and a held-out item that is one of them counts as missed; unset, they are candidates where a
    fifth or more of the validation items are such repeats. `batch_size` bounds the users evaluated together (unset:
    from the catalogue); metrics do not depend on it.

    `users` measures a sample of so many users, fixed by their ids and `users_seed` (unset: all users): the same for
    every method, on any number of ranks and in every run. The protocol names it.

    `baselines` are the simple methods that the model is compared with at the end (unset: all that can be fitted).
    """

    part: Literal["valid", "test"] | None = None
    ks: tuple[int, ...] = (10, 50, 200)
    baselines: tuple[str, ...] | None = None
    metric: str | None = None
    metrics: tuple[str, ...] = field(default=(), metadata={"kind": "metric"})
    every: int | None = 1
    patience: int | None = None
    min_drop: float = 0.0
    filter_seen: bool | None = True
    batch_size: int | None = None
    users: int | None = None
    users_seed: int = 0

    @property
    def excludes_seen(self) -> bool:
        """`filter_seen` of a resolved config."""
        assert self.filter_seen is not None, "resolve the config first"
        return self.filter_seen

    def check(self) -> None:
        positive(self, "every", "patience", "batch_size", "users")
        between(self, 0, math.inf, "users_seed")
        between(self, 0.0, math.inf, "min_drop")
        if not self.ks or any(k < 1 for k in self.ks):
            raise UserError(f"evaluate.ks must be positive cut-offs such as [10, 50, 200], got {list(self.ks)}")


@dataclass(frozen=True)
class DeliverConfig:
    """What the run recommends with. `model`: the trained model. `best`: what is best on the validation items, of the
    model, the simple methods, and a weighted sum of them.
    """

    choose: Literal["model", "best"] = "model"


@dataclass(frozen=True)
class TrainConfig:
    """How long and on what. Training ends after `epochs` or `steps`, whichever comes first; one may be unset.

    With both unset, epochs follow from the data: about a thousand steps, but at least 5 and at most 200 epochs.

    `checkpoint_every` counts steps between checkpoints besides those after each evaluation (unset: only those).
    `keep_checkpoints` is how many of the newest stay; the best one always does. With `background_save` training goes on
    while a copy of the state is written, which needs as much memory again as the weights and their optimiser's state.
    `precision` is that of the activations and of the products they are part of. With `bf16` activations take half the
    memory; parameters, optimisers, norms, sums and loss stay fp32. On a CPU projections are multiplied in bf16 where
    AVX512_BF16 or AMX works, else in fp32, and then nothing is faster. With `tf32` everything is stored in fp32, and
    products are in TF32 on accelerators that have it; on a CPU they are in fp32.
    `recompute` keeps the inputs of the blocks alone for the backward pass and computes what is inside them once more:
    the same weights with a fraction of the memory, in about a third more time.
    `gemm` is which library computes the products with weights of more than 131,072 elements on a CPU: `torch` (the one
    that PyTorch calls), `onednn`, `turbogr` (our own kernel), or a choice for each product such as
    "medium=torch/onednn/turbogr,large=torch/torch/torch" (forward, gradient of the input, gradient of the weight;
    large: 1,048,576 elements or more). `auto` takes the fastest of each, measured once per machine and number of
    threads, and stores it with the run, which keeps it. Digits differ between libraries.
    `profile` times a few early steps on a CPU by operator, for the report; it costs about a millisecond a step.
    `timeline` is what is kept of when every stage ran: `last` the newest few hundred steps of the first rank, `all`
    every step of every rank, about 110 bytes a stage, in the folder timeline.
    `on_bad_step` says what happens when the loss or a gradient is not finite, on any rank: `stop` ends training; `skip`
    leaves the update of that step out, on all ranks; `rewind` goes back to the last checkpoint with finite weights and
    leaves that step out. It ends all the same where more than `max_bad_steps_in_a_row`, or more than `max_bad_steps` in
    all, would be left out.
    `copy_data` keeps the data in the run folder when training ends, so that the run recommends and is measured without
    the original: `auto` if it has at most 256 MB, `always`, or `never`.
    """

    epochs: int | None = 20
    steps: int | None = None
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    backend: str = field(default="auto", metadata={"kind": "backend"})
    gemm: str = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    recompute: bool = False
    log_every: int = 10
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    background_save: bool = True
    tensorboard: bool = True
    profile: bool = True
    timeline: Literal["last", "all"] = "last"
    on_bad_step: Literal["stop", "skip", "rewind"] = "stop"
    max_bad_steps_in_a_row: int = 5
    max_bad_steps: int = 100
    copy_data: Literal["auto", "always", "never"] = "auto"

    def check(self) -> None:
        positive(self, "epochs", "steps", "threads", "log_every", "checkpoint_every", "keep_checkpoints")
        positive(self, "max_bad_steps_in_a_row", "max_bad_steps")


@dataclass(frozen=True)
class ParallelConfig:
    """How several ranks share the work; without effect on one. `parallel: auto` leaves everything to the defaults.

    `groups` × `members` is the number of ranks: each group holds the whole item table, sharded over its members. Unset
    follows from the topology: the ranks of one machine form a group, or those of as few machines as hold the table.
    `row_precision` is the precision in which rows of tables and their gradients are sent. Every `check_every` steps
    copies of the same weights are compared (unset: never). A rank that sends no heartbeat for `timeout` seconds,
    because its process is stopped or its machine is gone, is named and ends the job (unset: never); one that crashes
    ends it at once.

    `balance` says how ranks share the sequences of a batch: `none` equally many each, `token-budget` (with
    `data.batch_tokens`) equally many tokens, `reallocate` equal cost; `auto` chooses by the lengths. It changes the
    speed, never the result. A sequence of n tokens costs a·n + b·n²; `cost` is [a, b], in any unit (unset: measured
    when the run starts, and stored with it). `speeds` has a number per rank where devices are not equally fast.
    """

    groups: int | None = None
    members: int | None = None
    row_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    check_every: int | None = 100
    timeout: float | None = 60.0
    balance: Literal["auto", "none", "token-budget", "reallocate"] = "auto"
    cost: tuple[float, float] | None = None
    speeds: tuple[float, ...] | None = None

    def check(self) -> None:
        positive(self, "groups", "members", "check_every", "timeout")
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
    delaying only the rows that consecutive batches share. `depth` is how many batches are in progress, from loading to
    update. Unset it is 6 (in `semi_async` at least staleness + 2), and 1 for `sync` on one rank, where nothing runs
    early.
    """

    mode: Literal["sync", "semi_async", "exact_overlap"] = "sync"
    depth: int | None = None
    staleness: int = 1

    def check(self) -> None:
        positive(self, "depth", "staleness")
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
    """A whole run.

    `version` is that of the schema. A config without one is of the first, in which `model.name: fuxi-gamma` meant what
    is `fuxi` now, and `fuxi-beta` what is `fuxi-beta-days`.

    `plugins` are modules, or files relative to the recipe, that register components. `tables` and `features` go by
    names of the user's choice. `options` are the sections of chosen components, by their names; in a recipe they stand
    at top level. With `defaults: from-data`, dropout, loss, negatives and temperature follow from the size of the data
    unless they are given; `given` are the keys that a recipe or an override has.
    """

    version: int = VERSION
    plugins: tuple[str, ...] = ()
    task: str = field(default="retrieval", metadata={"kind": "task"})
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tables: dict[str, TableConfig] = field(default_factory=dict)
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    deliver: DeliverConfig = field(default_factory=DeliverConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    defaults: Literal["fixed", "from-data"] = "fixed"
    options: dict[str, Any] = field(default_factory=dict, metadata={"derived": True})
    given: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"derived": True})

    @property
    def method(self) -> str | None:
        """The simple method that `model.name` names; None where it names the block of a network."""
        name = self.model.name
        return name if name in registry.built_in_names("method") else None

    def chosen(self) -> list[tuple[str, str]]:
        """Return the components that this config chooses, as (kind, name)."""
        return [(kind, name) for kind, _, name in self._choices()]

    def check_names(self) -> None:
        """Raise UserError, with the nearest name, if something is chosen that is not registered."""
        for kind, key, name in self._choices():
            registry.check_name(kind, name, key)

    def check(self) -> None:
        """Raise UserError for values that make no sense, alone or together."""
        if not 1 <= self.version <= VERSION:
            raise UserError(
                f"the config is of version {self.version}; this TurboGR reads versions 1 to {VERSION}, later ones need "
                "a newer release"
            )
        self.check_names()
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            if hasattr(value, "check"):
                value.check()  # type: ignore[union-attr]
        for name, table in self.tables.items():
            positive(table, "rows", "dim", "lr", section=f"tables.{name}")
        for options in self.options.values():
            if hasattr(options, "check"):
                options.check()
        self._check_metric()
        self._check_users()
        self._check_baselines()
        self._check_hard()
        if self.parallel.balance == "token-budget" and self.data.batch_tokens is None:
            raise UserError("parallel.balance 'token-budget' needs data.batch_tokens; set it, or choose 'reallocate'")

    def _choices(self) -> list[tuple[str, str, str]]:
        """The components by kind, the setting that chooses it, and name."""
        single = [
            ("task", "task", self.task),
            ("block" if self.method is None else "method", "model.name", self.model.name),
            ("mask", "model.mask", self.model.mask),
            ("loss", "loss.name", self.loss.name),
            ("sampler", "loss.sampler", self.loss.sampler),
        ]
        metrics = [("metric", "evaluate.metrics", name) for name in self.evaluate.metrics]
        backend = self.train.backend
        if backend == "auto" or backend in registry.built_in_names("backend"):  # all operators have those
            return [*single, *metrics]
        return [*single, *metrics, ("backend", "train.backend", backend)]

    def _check_metric(self) -> None:
        metric = self.evaluate.metric
        if metric is None:
            return
        known = registry.find("task", self.task).factory.metric_names(self)
        if metric not in known:
            raise UserError(
                f"evaluate.metric '{metric}' is not measured; choose from {', '.join(known)}."
                f"{did_you_mean(metric, known)}"
            )

    def _check_users(self) -> None:
        if self.evaluate.users is not None and not registry.find("task", self.task).factory.samples_users:
            raise UserError(
                f"evaluate.users {self.evaluate.users} measures a sample of users, which the task '{self.task}' "
                "does not do; leave it out"
            )

    def _check_baselines(self) -> None:
        known = registry.find("task", self.task).factory.baseline_names()
        for name in self.evaluate.baselines or ():
            if name not in known:
                raise UserError(
                    f"evaluate.baselines names '{name}', which is no baseline of the task '{self.task}'; choose from "
                    f"{', '.join(known) or 'none'}.{did_you_mean(name, known)}"
                )

    def _check_hard(self) -> None:
        pipeline = self.pipeline
        depth = pipeline.depth_on(1)  # of `sync` on many ranks it is larger, but never too large unless it is set
        if not self.loss.has_hard() or depth <= HARD_DELAY:
            return
        if pipeline.depth is not None:
            cause, most = f"pipeline.depth {depth} draws batches", HARD_DELAY
        else:
            cause = f"pipeline.staleness {pipeline.staleness} has {depth} batches in flight and draws them"
            most = HARD_DELAY - 2
        raise UserError(
            f"{cause} earlier than hard negatives are known; set it to {most} or less, "
            "or the hard part of loss.shares to 0"
        )
