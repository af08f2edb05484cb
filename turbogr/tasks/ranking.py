"""Ranking: what a user does with an item that is shown, from the user's history with its actions.

Every event, or the last ones of every sequence, are queries: their actions are predicted from what was known before, as
`models/ranking_layout.py` lays out. Evaluation predicts every event of a part in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from turbogr.config import Config, EvaluateConfig, RankingConfig
from turbogr.data.action_counts import ActionCounts, Values
from turbogr.data.batching import Batch
from turbogr.data.feature_values import FeatureValues
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError, did_you_mean
from turbogr.evaluation.action_baselines import BASELINES, measure_action_baselines, refused_action_baselines
from turbogr.evaluation.action_evaluation import (
    ActionEvaluation,
    HeldOutActions,
    action_metric_names,
    describe_action_metrics,
    measure_actions,
)
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.evaluation.user_positions import Measured
from turbogr.jagged import Jagged
from turbogr.layers.block import Block
from turbogr.models.feature_tower import Feature, mean_of_rows
from turbogr.models.ranking_layout import RankingLayout, every_event, last_events, ranking_layout
from turbogr.models.ranking_model import RankingInput, RankingModel
from turbogr.parallel.world import World
from turbogr.plugins import find, register
from turbogr.random import Dropout, apply_dropout, derive_seed
from turbogr.tables.embedding_tables import ITEM, EmbeddingTables, TableSpec
from turbogr.tables.working_set import BatchIds, TableIds, WorkingSets
from turbogr.tasks.features import USER, features_of, resolve_features, table_specs, user_table_spec
from turbogr.tasks.ranking_prediction import predict_events, predict_requests
from turbogr.tasks.ranking_requests import RankingRequests
from turbogr.tasks.task import DataFacts, Flops, Metrics, Task

_ID_SITE = 0x1D
COUNTS = "counts"
"""Name of the feature that holds what is known of item and user; no column of a store, whose features have an owner."""


@register("task", "ranking", config=RankingConfig)
class RankingTask(Task):
    """A sequence model whose output at an item is trained to say which actions follow."""

    name = "ranking"
    predicts_actions = True

    def __init__(self, config: Config, data: DataFacts) -> None:
        self.config, self.ranking = config, _section(config)
        _check_block(config)
        self.tables = self.table_specs(config, data.num_items)
        self.features = features_of(config)
        dim = config.model.dim
        assert dim is not None, "resolve the config first"
        widths = {spec.name: spec.dim for spec in self.tables}
        ids = [("item", ITEM, self.ranking.item_ids), (USER, USER, self.ranking.user_ids)]
        own = {owner: [Feature(owner, "", t, widths[t], owner=owner)] for owner, t, used in ids if used}
        self.item_features = own.get("item", []) + [f for f in self.features if f.owner != "user"]
        self.user_features = own.get(USER, []) + [f for f in self.features if f.owner == "user"]
        # Features of which the model sees what was done with their values.
        self._counted = [f for f in self.features if f.owner != "user" and f.table is not None and "." in f.column]
        if self.ranking.counts:
            width = ActionCounts.width(len(set(self.ranking.actions.values())), len(self._counted))
            self.item_features.append(Feature(COUNTS, "", None, width, "number"))
        self._store = data.store
        self._counts: tuple[str, ActionCounts] | None = None
        actions = dict.fromkeys([*self.ranking.actions.values(), *self.ranking.input_actions])
        self.columns = {feature.name: feature.column for feature in self.features}
        self.columns |= {f"action.{name}": f"action.{name}" for name in actions}
        self.model: RankingModel = RankingModel(
            config.model,
            self.ranking,
            self.item_features,
            self.user_features,
            base=[self._base(name) for name in self.ranking.tasks],
            options=config.options,
            recompute=config.train.recompute,
            precision=config.train.precision,
        )

    # What files and commands need without a model.

    @staticmethod
    def resolve(config: Config, store: Store, split: Split) -> Config:
        ranking = _section(config)
        ranking.check()
        config = resolve_features(config, store, use_all=True, with_users=ranking.user_ids)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, repeated_targets="train"))
        statistics = {name: action_statistics(store, split, ranking, name) for name in _actions_of(ranking)}
        ranking = dataclasses.replace(ranking, statistics=statistics)
        if ranking.counts and ranking.counts_until is None:
            ranking = dataclasses.replace(ranking, counts_until=end_of_training(store, split))
        return dataclasses.replace(config, options={**config.options, "ranking": ranking})

    @staticmethod
    def table_specs(config: Config, num_items: int) -> list[TableSpec]:
        specs = table_specs(config, num_items)
        return [*specs, user_table_spec(config)] if _section(config).user_ids else specs

    @staticmethod
    def metric_names(config: Config, *, final: bool = False) -> list[str]:
        return action_metric_names(_section(config).tasks)

    @staticmethod
    def default_metric(config: Config) -> str:
        ranking = _section(config)
        ranking.check()
        return action_metric_names(ranking.tasks)[0]

    @staticmethod
    def describe_metrics(names: Iterable[str]) -> list[MetricInfo]:
        return describe_action_metrics(names)

    @staticmethod
    def rule(config: EvaluateConfig, *, final: bool = False) -> dict[str, Any]:
        return {"events": "all", "history": "earlier times"}

    @staticmethod
    def describe_rule(config: EvaluateConfig) -> str:
        return "all events of the part"

    @staticmethod
    def is_comparable(rule: Mapping[str, Any]) -> bool:
        return rule.get("history") == "earlier times"

    # Training.

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.model.reset_parameters(generator)

    def reset_tables(self, tables: EmbeddingTables) -> None:
        """Users and items start as unknown ones, so that those who never occur in training stay such."""
        for spec in self.tables:
            if spec.name in (ITEM, USER):
                tables.clear(spec.name)
            else:
                tables.assign(spec.name, torch.zeros(1, spec.dim))

    def prepare(self, batch: Batch, step: int) -> Batch:
        return batch if self._store is None else self.with_counts(batch, self._store)

    def with_counts(self, batch: Batch, store: Store) -> Batch:
        """Return a batch with what is known of its items and users before each event, if the model sees it."""
        if not self.ranking.counts:
            return batch
        if self._counts is None or self._counts[0] != store.manifest.content_hash:
            until = self.ranking.counts_until
            assert until is not None, "resolve the config first"
            actions = list(dict.fromkeys(self.ranking.actions.values()))
            columns = {feature.name: store.features[feature.column] for feature in self._counted}
            counts = ActionCounts(store, actions, columns, self.ranking.statistics, until, self.ranking.delay)
            self._counts = store.manifest.content_hash, counts
        users = batch.users.repeat_interleave(batch.items.lengths).numpy()
        values = {feature.name: _category_values(batch.features[feature.name]) for feature in self._counted}
        floats = self._counts[1].floats(users, batch.items.values.numpy(), batch.times.numpy(), values)
        return dataclasses.replace(batch, features={**batch.features, COUNTS: torch.from_numpy(floats)})

    def ids(self, batch: Batch) -> BatchIds:
        """Return the ids of the tokens' features, then of the users', in the order of `outputs`."""
        inputs: dict[str, list[Tensor]] = {ITEM: []}
        for feature, values in self._looked_up(batch):
            assert feature.table is not None
            inputs.setdefault(feature.table, []).append(values.values if isinstance(values, Jagged) else values)
        return {table: TableIds(ids) for table, ids in inputs.items()}

    def _looked_up(self, batch: Batch) -> list[tuple[Feature, FeatureValues]]:
        """Return the features that are looked up with their rows, in a fixed order."""
        found: list[tuple[Feature, FeatureValues]] = []
        for feature in (*self.item_features, *self.user_features):
            if feature.table == ITEM:
                found.append((feature, batch.items.values))
            elif feature.table == USER and not feature.column:
                found.append((feature, batch.users + 1))
            elif feature.table is not None:
                values = batch.user_features if feature.owner == "user" else batch.features
                found.append((feature, values[feature.name]))
        return found

    def layout(self, batch: Batch) -> RankingLayout:
        """Return the tokens of a training batch, which is in host memory."""
        delay = self.ranking.delay
        if self.ranking.supervision == "every":
            return ranking_layout(batch.items, *every_event(batch.items, batch.times, delay))
        return ranking_layout(batch.items, *last_events(batch.items, batch.times, self.ranking.candidates, delay))

    def loss(self, sets: WorkingSets, batch: Batch, step: int, *, seed: int | None) -> Tensor:
        layout = self.layout(batch.at_hand).to(batch.items.values.device)
        vectors = sets.look_up_inputs(self.ids(batch.at_hand), batch.items.values.device)
        outputs = self.outputs(vectors, batch, layout, seed)
        losses = [
            target.weight * self._loss_of(name, outputs[:, number], batch, layout)
            for number, (name, target) in enumerate(self.ranking.tasks.items())
        ]
        return torch.stack(losses).sum() / self._num_queries(batch.lengths_of_step)

    def _num_queries(self, lengths: Tensor) -> int:
        every = self.ranking.supervision == "every"
        return max(1, int((lengths if every else lengths.clamp(max=self.ranking.candidates)).sum()))

    def _loss_of(self, name: str, outputs: Tensor, batch: Batch, layout: RankingLayout) -> Tensor:
        """Return the sum of a task's losses; events whose action is not known have none."""
        labels = batch.actions[f"action.{self.ranking.actions[name]}"][layout.queries]
        known = ~torch.isnan(labels)
        labels = torch.where(known, labels, 0.0)
        if self.ranking.tasks[name].kind == "binary":
            losses = F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
        else:
            mean, std = self._scale(self.ranking.actions[name])
            losses = (outputs - (labels - mean) / std).square()
        return (losses * known).sum()

    def outputs(
        self, vectors: Mapping[str, list[Tensor]], batch: Batch, layout: RankingLayout, seed: int | None
    ) -> Tensor:
        """Return the model's output of every query, [N, tasks]; `vectors` are those of `ids`, by table."""
        waiting = {table: list(found) for table, found in vectors.items()}
        items: dict[str, Tensor] = {}
        users: dict[str, Tensor] = {}
        for feature, values in self._looked_up(batch):
            assert feature.table is not None
            rows = waiting[feature.table].pop(0)
            if isinstance(values, Jagged):
                rows = mean_of_rows(rows, values)
            if not feature.column:
                rows = self._drop_ids(rows, batch, feature, seed)
            (users if feature.owner == "user" else items)[feature.name] = rows
        for feature in (*self.item_features, *self.user_features):
            if feature.table is None:
                of_user = feature.owner == "user"
                floats = (batch.user_features if of_user else batch.features)[feature.name]
                assert isinstance(floats, Tensor)
                (users if of_user else items)[feature.name] = floats
        given = RankingInput(items, users, self._actions(batch), batch.times, batch.events, batch.users)
        return self.model(given, layout, seed)  # type: ignore[no-any-return]

    def _drop_ids(self, rows: Tensor, batch: Batch, feature: Feature, seed: int | None) -> Tensor:
        """Replace some users and items by unknown ones, in training."""
        rate = self.ranking.id_dropout
        if seed is None or rate == 0:
            return rows
        keys = batch.users if feature.owner == "user" else batch.events
        kept = apply_dropout(rows.new_ones(len(rows), 1), Dropout(rate, derive_seed(seed, _ID_SITE)), keys)
        return rows * (kept > 0)

    def _actions(self, batch: Batch) -> Tensor:
        """Return what was done in every event, [T, inputs]: 0 or 1, numbers in standard deviations from their mean."""
        columns = []
        for name in self.ranking.input_actions:
            values = batch.actions[f"action.{name}"]
            mean, std = self._scale(name)
            columns.append((values - mean) / std if self._is_number(name) else values)
        if not columns:
            return batch.times.new_zeros(batch.num_tokens, 0, dtype=torch.float32)
        return torch.stack(columns, 1)

    def _is_number(self, action: str) -> bool:
        return self.ranking.statistics[action][1] > 0

    def _scale(self, action: str) -> tuple[float, float]:
        mean, std = self.ranking.statistics[action]
        return mean, std or 1.0

    def _base(self, task: str) -> float:
        """Return the output that predicts the mean of the training events."""
        mean = self.ranking.statistics[self.ranking.actions[task]][0]
        if self.ranking.tasks[task].kind == "regression":
            return 0.0
        rate = min(max(mean, 1e-4), 1 - 1e-4)
        return float(np.log(rate / (1 - rate)))

    def flops(self, lengths: Tensor) -> Flops:
        """Count products of the blocks, the towers and the head; `lengths` are those of the training sequences."""
        queries = lengths if self.ranking.supervision == "every" else lengths.clamp(max=self.ranking.candidates)
        history = (lengths - 1 if self.ranking.supervision == "every" else lengths - queries).clamp(min=0)
        longest = torch.full_like(lengths, self.model.max_len)
        strict = self._flops(history, queries, self._pairs(history, queries, lengths))
        return Flops(strict, self._flops(longest, longest, 4.0 * float(longest.double().square().sum())))

    def _pairs(self, history: Tensor, queries: Tensor, lengths: Tensor) -> float:
        """Pairs of tokens of which one sees the other, events at the same time counted as if they were not."""
        h, q, n = history.double(), queries.double(), lengths.double()
        seen = n * (n - 1) / 2 if self.ranking.supervision == "every" else q * h
        return float(((h + 1) * (h + 2) / 2 + seen + 2 * q).sum())

    def _flops(self, history: Tensor, queries: Tensor, pairs: float) -> float:
        blocks = [block for block in self.model.blocks if isinstance(block, Block)]
        in_blocks = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() > 1)
        in_head, in_tower = (_weights(part) for part in (self.model.head, self.model.items))
        tokens, users = float(history.sum() + queries.sum()), history.numel()
        weights = (tokens + users) * in_blocks + float(queries.sum()) * in_head
        weights += tokens * in_tower + users * _weights(self.model.users)
        return 6 * (weights + pairs * sum(block.products_per_pair() for block in blocks))

    def with_made_up_features(self, batch: Batch) -> Batch:
        def values(feature: Feature, rows: int) -> FeatureValues:
            if feature.kind == "categories":
                return Jagged.from_lengths(torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64))
            return torch.zeros(rows, feature.dim) if feature.table is None else torch.zeros(rows, dtype=torch.int64)

        names = [name for name in self.columns if name.startswith("action.")]
        of_items = [feature for feature in self.item_features if feature.table != ITEM]
        of_users = [feature for feature in self.user_features if feature.table != USER]
        return dataclasses.replace(
            batch,
            users=torch.zeros_like(batch.users),
            targets=None,
            features={feature.name: values(feature, batch.num_tokens) for feature in of_items},
            user_features={feature.name: values(feature, batch.num_sequences) for feature in of_users},
            actions={name: torch.zeros(batch.num_tokens) for name in names},
        )

    # Measuring.

    @property
    def device(self) -> torch.device:
        return self.model.context.device

    def in_own_units(self, outputs: Tensor) -> NDArray[np.float64]:
        """Return the model's outputs [N, tasks] as probabilities, and numbers in their own units."""
        columns = []
        for number, (name, target) in enumerate(self.ranking.tasks.items()):
            found = outputs[:, number].double()
            mean, std = self._scale(self.ranking.actions[name])
            columns.append(torch.sigmoid(found) if target.kind == "binary" else found * std + mean)
        return torch.stack(columns, dim=1).cpu().numpy()  # type: ignore[no-any-return]

    def by_name(self, predictions: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return the columns of predictions [n, tasks] by task."""
        return {name: predictions[:, number] for number, name in enumerate(self.ranking.tasks)}

    def predict(
        self, tables: Mapping[str, Tensor], store: Store, requests: RankingRequests
    ) -> dict[str, NDArray[np.float64]]:
        """Predict all candidates of requests, [n] by task: a probability, or a number in its own unit.

        A prediction does not depend on what else is asked for, but for rounding.
        """
        return predict_requests(self, tables, store, requests)

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
    ) -> ActionEvaluation:
        held_out = HeldOutActions.of(store, split, part, self.ranking.tasks)
        starts, ends = split.events(part)
        found = predict_events(
            self, tables, store, starts, ends, progress=progress, should_stop=should_stop, world=world
        )
        return measure_actions(held_out, found, warn=final)

    @staticmethod
    def baseline_names() -> list[str]:
        return list(BASELINES)

    def baselines(self, store: Store, split: Split, part: str, **options: Any) -> dict[str, Metrics]:
        measured = self.measure_baselines(store, split, part, **options)
        return {name: system.metrics for name, system in measured.items()}

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
        names = self.config.evaluate.baselines
        measured = measure_action_baselines(
            store, split, part, self.ranking.tasks, self.columns, names=names, should_stop=should_stop
        )
        return {name: Measured.of(found) for name, found in measured.items()}

    def refused_baselines(self, store: Store, split: Split) -> dict[str, str]:
        return refused_action_baselines(self.config.evaluate.baselines)


def _section(config: Config) -> RankingConfig:
    section = find("task", "ranking").section(config.options)
    assert isinstance(section, RankingConfig)
    return section


def _actions_of(ranking: RankingConfig) -> list[str]:
    """The actions that are predicted or seen."""
    return list(dict.fromkeys([*ranking.actions.values(), *ranking.input_actions]))


def _check_block(config: Config) -> None:
    """Raise UserError for blocks and masks that know tokens by their place, which queries do not have."""
    if config.model.name != "stu":
        raise UserError(
            f"model.name is '{config.model.name}', whose attention knows tokens by their place in the sequence; a "
            "ranking model asks for many items from the same place: set model.name=stu"
        )
    if config.model.mask != "causal":
        raise UserError(
            f"model.mask is '{config.model.mask}', and the task 'ranking' has a mask of its own; set model.mask=causal "
            "or leave it out"
        )


def action_statistics(store: Store, split: Split, ranking: RankingConfig, action: str) -> tuple[float, float]:
    """Return the mean and the standard deviation of an action in the training events; a binary one has no deviation.

    Raises:
        UserError: the store does not have it, or not as what the task predicts.
    """
    column = store.features.get(f"action.{action}")
    if column is None:
        known = sorted(other.name for other in store.features.values() if other.owner == "action")
        has = f"it has {', '.join(known)}" if known else "it has none; keep some with `turbogr prepare --actions`"
        tasks = [f"ranking.tasks.{name}" for name, own in ranking.actions.items() if own == action]
        raise UserError(
            f"{tasks[0] if tasks else 'ranking.inputs'} names the action '{action}', which {store.path} does not have; "
            f"{has}.{did_you_mean(action, known)}"
        )
    binary = column.info.kind == "binary"
    for name, target in ranking.tasks.items():
        if ranking.actions[name] == action and target.kind == "binary" and not binary:
            raise UserError(
                f"ranking.tasks.{name} predicts whether '{action}' happens, and it is a number in {store.path}; set "
                f"ranking.tasks.{name}.kind=regression, or prepare a condition such as --actions '{name}={action}>=4'"
            )
    total, squares, count = 0.0, 0.0, 0
    for first, last in store.user_blocks():
        start, stop = int(store.offsets[first]), int(store.offsets[last])
        training = np.arange(start, stop) < np.repeat(
            split.train_end[first:last], np.diff(store.offsets[first : last + 1])
        )
        values = np.asarray(column.values[start:stop], np.float64)[training]
        values = values[~np.isnan(values)]
        total, squares, count = total + values.sum(), squares + np.square(values).sum(), count + len(values)
    if not count:
        raise UserError(
            f"the action '{action}' is known of no training event of {store.path}, so nothing could be learnt; choose "
            "another split, or leave it out"
        )
    mean = total / count
    return float(mean), 0.0 if binary else float(max(squares / count - mean**2, 0.0) ** 0.5) or 1.0


def end_of_training(store: Store, split: Split) -> int:
    """Return the time from which events do not train: the cut of a split by time, else that of the last one + 1."""
    if split.rule.startswith("time:"):
        return int(split.rule.removeprefix("time:").split(",")[0])
    latest = 0
    for first, last in store.user_blocks():
        start, stop = int(store.offsets[first]), int(store.offsets[last])
        lengths = np.diff(store.offsets[first : last + 1])
        training = np.arange(start, stop) < np.repeat(split.train_end[first:last], lengths)
        latest = max(latest, int(np.asarray(store.times[start:stop])[training].max(initial=0)))
    return latest + 1


def _category_values(values: FeatureValues) -> Values:
    if isinstance(values, Jagged):
        return Values(values.values.numpy(), values.lengths.numpy())
    return Values(values.numpy())


def _weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)
