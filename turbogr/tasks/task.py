"""The interface of a task.

A task owns its model, which rows of which tables a batch needs, its loss, and its metrics and how they are measured.
The trainer, the executors, checkpoints, reports and sweeps work with any task through this class, so a new task needs
no change to them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turbogr.config import Config, EvaluateConfig
from turbogr.data.batching import Batch
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.evaluation.metric_info import Coverage, MetricInfo
from turbogr.evaluation.user_positions import Measured
from turbogr.evaluation.user_sample import UserSample
from turbogr.layers import Block
from turbogr.parallel.world import World
from turbogr.simple.delivery import Delivered
from turbogr.tables.embedding_tables import EmbeddingTables, TableSpec
from turbogr.tables.working_set import BatchIds, WorkingSets
from turbogr.tasks.features import resolve_features

Metrics = dict[str, float]


@dataclass(frozen=True)
class DataFacts:
    """What a task must know of the data: the number of items, and how often each occurs in the training events.

    `counts` is called only where it is needed; None means that all items count the same. `store` is what is trained
    on, None where a stored model is opened.
    """

    num_items: int
    counts: Callable[[], NDArray[np.int64]] | None = None
    store: Store | None = None


class Flops(NamedTuple):
    """Arithmetic of one training step: what must be computed, and counted at the model's full length."""

    strict: float
    nominal: float


class Measurement(Protocol):
    """The result of an evaluation on one part of the held-out data."""

    @property
    def part(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def num_users(self) -> int: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    @property
    def protocol(self) -> str: ...


class Task(ABC):
    """What a run learns. The config must be resolved; parameters have no values until `reset_parameters`."""

    name: ClassVar[str]
    predicts_items: ClassVar[bool] = False
    """Whether it ranks items for users, so that it matters which of them a user has had before.

    Its evaluation then follows `evaluate.filter_seen`, and its loss counts the positions `Batch.trained` alone."""
    predicts_actions: ClassVar[bool] = False
    """Whether it predicts what users do with an item, so that every event of a part is held out, and every training
    event of a user is trained on, the first one included."""
    samples_users: ClassVar[bool] = False
    """Whether its evaluation follows `evaluate.users`."""
    model: nn.Module
    tables: list[TableSpec]
    columns: dict[str, str]
    """Column of the store behind every feature that batches carry, by the feature's name."""

    # What files and commands need without a model.

    @staticmethod
    def resolve(config: Config, store: Store, split: Split) -> Config:
        """Fill in what the task needs to know of a store, and check that it has it.

        Raises:
            UserError: it has not.
        """
        return resolve_features(config, store)

    @staticmethod
    @abstractmethod
    def table_specs(config: Config, num_items: int) -> list[TableSpec]:
        """Return the tables that a resolved config needs."""

    @staticmethod
    @abstractmethod
    def metric_names(config: Config, *, final: bool = False) -> list[str]:
        """Return the names of the metrics that this task measures during training, or with `final` in the summary."""

    @staticmethod
    @abstractmethod
    def default_metric(config: Config) -> str:
        """Return the metric that chooses the best checkpoint where the config does not name one."""

    @staticmethod
    def baseline_names() -> list[str]:
        """Return the names that `evaluate.baselines` may have."""
        return []

    @staticmethod
    @abstractmethod
    def describe_metrics(names: Iterable[str]) -> list[MetricInfo]:
        """Return the descriptions of metrics in the order in which they are shown."""

    @staticmethod
    @abstractmethod
    def rule(config: EvaluateConfig, *, final: bool = False) -> dict[str, Any]:
        """Return the settings that measured values depend on; it is stored with them. `final` as in `metric_names`."""

    @staticmethod
    @abstractmethod
    def describe_rule(config: EvaluateConfig) -> str:
        """Return `rule` as the end of a sentence, without the cut-offs."""

    @staticmethod
    @abstractmethod
    def is_comparable(rule: Mapping[str, Any]) -> bool:
        """Return whether values measured by a stored `rule` can be compared with those of this release."""

    # Training.

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all dense parameters; the same generator state gives the same parameters."""

    def reset_tables(self, tables: EmbeddingTables) -> None:  # noqa: B027
        """Change rows of tables that have just been drawn; most tasks leave them as they are."""

    @abstractmethod
    def prepare(self, batch: Batch, step: int) -> Batch:
        """Return the batch with everything drawn that its loss needs; on any thread, some steps ahead."""

    @abstractmethod
    def ids(self, batch: Batch) -> BatchIds:
        """Return the ids that a prepared batch needs, by table."""

    @abstractmethod
    def loss(self, sets: WorkingSets, batch: Batch, step: int, *, seed: int | None) -> Tensor:
        """Return this rank's part of the step's mean loss: summed over the ranks, it is the loss.

        `seed` decides what dropout drops; None drops nothing.
        """

    def is_due(self, step: int) -> bool:
        """Return whether `refresh` must be called before the rows of `step` are updated."""
        return False

    def refresh(self, tables: EmbeddingTables, step: int) -> None:
        """Derive what the task keeps from the tables; over many ranks, collective."""
        raise NotImplementedError(f"{type(self).__name__} is due at step {step} and has no refresh")

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint must hold besides model and tables; most tasks have none."""
        return {}

    @abstractmethod
    def flops(self, lengths: Tensor) -> Flops:
        """Return the arithmetic of a training step on sequences of `lengths` [B]."""

    def flops_of(self, batch: Batch) -> Flops:
        """Return the arithmetic of the training step that a batch is, or is a rank's part of."""
        return self.flops(batch.lengths_of_step)

    def with_made_up_features(self, batch: Batch) -> Batch:
        """Return a batch of random items with values for all features, as timing a step needs them."""
        rows = torch.zeros_like(batch.items.values)
        return dataclasses.replace(batch, features=dict.fromkeys(self.columns, rows))

    @property
    def num_parameters(self) -> int:
        """Number of dense parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def model_name(self, config: Config) -> str:
        """Return what output calls the model: by its block, or by the task if it has no block."""
        return config.model.name if self.has_blocks else self.name

    @property
    def has_blocks(self) -> bool:
        """Whether the model consists of blocks, as the section `model` of the config describes them."""
        return any(isinstance(module, Block) for module in self.model.modules())

    @property
    def needs_step_targets(self) -> bool:
        """Whether every rank must know the targets of the whole step."""
        return False

    # Measuring.

    def sample(self, users: int | None = None) -> UserSample | None:
        """Return the users that are measured; None: all. `users` replaces the number of the config."""
        return None

    def num_measured(self, split: Split, part: str, num_ranks: int = 1, users: int | None = None) -> int:
        """Return about how many users a rank measures on a part, for showing progress."""
        total, sample = int((split.targets(part) >= 0).sum()), self.sample(users)
        return -(-(total if sample is None else min(total, sample.num_users)) // num_ranks)

    @abstractmethod
    def evaluate(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        part: str,
        *,
        final: bool = False,
        progress: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        world: World | None = None,
    ) -> Measurement:
        """Measure the model with whole tables [num_rows, dim] on a part of the held-out data, "valid" or "test".

        `final` adds the metrics that the summary of a run has. Over many ranks all call it and get the whole result.

        Raises:
            Interrupted: `should_stop` returned True, on any rank.
        """

    @abstractmethod
    def baselines(
        self,
        store: Store,
        split: Split,
        part: str,
        *,
        final: bool = False,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, Metrics]:
        """Return the metrics of simple methods by name, on the same data and by the same rule as `evaluate`."""

    def measure_baselines(
        self,
        store: Store,
        split: Split,
        part: str,
        *,
        final: bool = False,
        should_stop: Callable[[], bool] | None = None,
        **options: Any,
    ) -> dict[str, Measured]:
        """Return `baselines` with standard errors and positions, where the task knows them."""
        measured = self.baselines(store, split, part, final=final, should_stop=should_stop, **options)
        return {name: Measured(metrics) for name, metrics in measured.items()}

    def refused_baselines(self, store: Store, split: Split) -> dict[str, str]:
        """Return why some baselines are not measured on a log, as sentences by name."""
        return {}

    def deliver(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> Delivered | None:
        """Choose what the run recommends with, by `deliver.choose`; None for tasks that recommend nothing."""
        return None

    def evaluate_delivered(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        part: str,
        *,
        final: bool = False,
        should_stop: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Measurement | None:
        """Measure what the run recommends with, as `evaluate` does the model; None where it is the model."""
        return None

    def coverage(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        part: str,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> Coverage | None:
        """Return how much of the catalogue is shown to the users of a part; None if the task recommends nothing."""
        return None

    def samples(self, tables: Mapping[str, Tensor], store: Store, split: Split, part: str) -> dict[str, Any] | None:
        """Return the content of samples.json, examples of what the model does, for the report; None for no examples."""
        return None


TaskFactory = Callable[[Config, DataFacts], Task]
