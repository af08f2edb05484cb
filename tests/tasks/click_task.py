"""A task that is not retrieval, as a plug-in: it trains like retrieval, and is measured by a loss and an AUC.

The values are fixed, so that tests know which evaluation is the best: `LOSSES` in turn during training, 0.41 later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turbogr.config import Config, EvaluateConfig
from turbogr.data.batching import Batch
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.plugins import register
from turbogr.tables.embedding_tables import TableSpec
from turbogr.tables.working_set import BatchIds, WorkingSets
from turbogr.tasks.retrieval import RetrievalTask
from turbogr.tasks.task import DataFacts, Flops, Task

LOSSES = [0.6, 0.4, 0.5]
METRICS = [
    MetricInfo("log_loss", "Log loss", higher_is_better=False, unit="nats"),
    MetricInfo("auc", "AUC", format="share", sentence="orders {value} of the pairs correctly"),
]


@dataclass(frozen=True)
class Clicks:
    part: str
    metrics: dict[str, float]
    num_users: int = 40
    skipped: Mapping[str, int] = field(default_factory=dict)
    protocol: str = "clicks are predicted"


@register("task", "clicks")
class ClickTask(Task):
    name = "clicks"

    def __init__(self, config: Config, data: DataFacts) -> None:
        self.inner = RetrievalTask(config, data)
        self.model, self.tables, self.columns = self.inner.model, self.inner.tables, self.inner.columns
        self.losses = list(LOSSES)

    @staticmethod
    def table_specs(config: Config, num_items: int) -> list[TableSpec]:
        return RetrievalTask.table_specs(config, num_items)

    @staticmethod
    def metric_names(config: Config, *, final: bool = False) -> list[str]:
        return [metric.name for metric in METRICS]

    @staticmethod
    def default_metric(config: Config) -> str:
        return "log_loss"

    @staticmethod
    def describe_metrics(names: Iterable[str]) -> list[MetricInfo]:
        wanted = set(names)
        return [metric for metric in METRICS if metric.name in wanted]

    @staticmethod
    def rule(config: EvaluateConfig, *, final: bool = False) -> dict[str, Any]:
        return {"threshold": 4}

    @staticmethod
    def describe_rule(config: EvaluateConfig) -> str:
        return "clicks"

    @staticmethod
    def is_comparable(rule: Mapping[str, Any]) -> bool:
        return rule.get("threshold") == 4

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.inner.reset_parameters(generator)

    def prepare(self, batch: Batch, step: int) -> Batch:
        return self.inner.prepare(batch, step)

    def ids(self, batch: Batch) -> BatchIds:
        return self.inner.ids(batch)

    def loss(self, sets: WorkingSets, batch: Batch, step: int, *, seed: int | None) -> Tensor:
        return self.inner.loss(sets, batch, step, seed=seed)

    def flops(self, lengths: Tensor) -> Flops:
        return self.inner.flops(lengths)

    def evaluate(self, tables, store, split, part, **options):
        during_training = part == "valid" and not options.get("final")
        loss = self.losses.pop(0) if during_training else 0.41
        return Clicks(part, {"log_loss": loss, "auc": 1 - loss})

    def baselines(self, store, split, part, **options):
        return {"rate": {"log_loss": 0.55, "auc": 0.5}}
