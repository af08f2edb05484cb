"""Retrieval: predict the next item of every user among all items."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from turbogr.config import Config, EvaluateConfig
from turbogr.data.batching import Batch
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.baseline_titles import TITLES
from turbogr.evaluation.coverage import coverage
from turbogr.evaluation.evaluator import Evaluation, evaluate, measure_baselines
from turbogr.evaluation.metric_info import Coverage, MetricInfo
from turbogr.evaluation.metrics import DEFAULT_KS, REPEATED, describe_metrics, extra_metrics
from turbogr.evaluation.sample_users import sample_users
from turbogr.evaluation.scorer import ModelScorer, Scorer
from turbogr.evaluation.user_positions import Measured
from turbogr.evaluation.user_sample import UserSample
from turbogr.models import RetrievalModel
from turbogr.models.flops import nominal_flops, strict_flops
from turbogr.models.table_encoder import TableEncoder
from turbogr.negatives import LossContext, make_loss
from turbogr.parallel.world import World
from turbogr.plugins import register
from turbogr.simple.delivery import Delivered, choose_delivered
from turbogr.simple.selection import Selection, choose_methods
from turbogr.tables.embedding_tables import ITEM, EmbeddingTables, TableSpec
from turbogr.tables.working_set import BatchIds, TableIds, WorkingSets
from turbogr.tasks.cold_items import with_cold_items
from turbogr.tasks.features import features_of, looked_up, resolve_features, table_specs
from turbogr.tasks.task import DataFacts, Flops, Metrics, Task


@register("task", "retrieval")
class RetrievalTask(Task):
    """A sequence model whose output at every token is trained to lie close to the next item's vector."""

    name = "retrieval"
    predicts_items = True
    samples_users = True

    def __init__(self, config: Config, data: DataFacts) -> None:
        self.config = config
        self.tables = self.table_specs(config, data.num_items)
        self.features = features_of(config)
        self.columns = {feature.name: feature.column for feature in self.features}
        self.model: RetrievalModel = RetrievalModel(
            config.model,
            options=config.options,
            recompute=config.train.recompute,
            precision=config.train.precision,
            features={feature.name: feature.dim for feature in self.features},
        )
        self.delivered: Delivered | None = None
        self._selections: dict[Any, Selection] = {}
        self._recommender: tuple[Delivered, Scorer] | None = None
        self.objective = make_loss(config, LossContext(data.num_items, config.train.seed, data.counts))

    @staticmethod
    def resolve(config: Config, store: Store, split: Split) -> Config:
        config = resolve_features(config, store)
        for name, feature in config.features.items():
            if feature.kind not in (None, "category") or feature.owner not in (None, "event"):
                raise UserError(
                    f"features.{name} is a {feature.kind} of {feature.owner}s, and retrieval takes categories of "
                    "events; leave it out"
                )
        return config

    @staticmethod
    def table_specs(config: Config, num_items: int) -> list[TableSpec]:
        return table_specs(config, num_items)

    @staticmethod
    def metric_names(config: Config, *, final: bool = False) -> list[str]:
        ks = _final_ks(config.evaluate) if final else config.evaluate.ks
        return ["mrr", *(f"{family}@{k}" for family in ("hr", "ndcg") for k in ks), *config.evaluate.metrics]

    @staticmethod
    def default_metric(config: Config) -> str:
        ks = config.evaluate.ks
        return "ndcg@10" if 10 in ks else f"ndcg@{ks[0]}"

    @staticmethod
    def baseline_names() -> list[str]:
        return list(TITLES)

    @staticmethod
    def describe_metrics(names: Iterable[str]) -> list[MetricInfo]:
        return describe_metrics(names)

    @staticmethod
    def rule(config: EvaluateConfig, *, final: bool = False) -> dict[str, Any]:
        ks = list(_final_ks(config) if final else config.ks)
        rule = {"ks": ks, "filter_seen": config.excludes_seen, "repeated": REPEATED}
        if config.users is not None:
            rule |= {"users": config.users, "users_seed": config.users_seed}
        return {**rule, "metrics": list(config.metrics)} if config.metrics else rule

    @staticmethod
    def describe_rule(config: EvaluateConfig) -> str:
        seen = f"seen items out, repeated ones {REPEATED}" if config.excludes_seen else "seen items in"
        return seen if config.users is None else f"{seen}, {config.users} users of seed {config.users_seed}"

    @staticmethod
    def is_comparable(rule: Mapping[str, Any]) -> bool:
        return not rule.get("filter_seen", True) or rule.get("repeated") == REPEATED

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.model.reset_parameters(generator)

    def reset_tables(self, tables: EmbeddingTables) -> None:
        for spec in self.tables:
            if spec.name != ITEM:  # a missing value adds nothing until some are learnt from
                tables.assign(spec.name, torch.zeros(1, spec.dim))

    def prepare(self, batch: Batch, step: int) -> Batch:
        return dataclasses.replace(batch, negatives=self.objective.draw(batch.at_trained(), step))

    def ids(self, batch: Batch) -> BatchIds:
        targets = batch.at_trained().targets
        assert targets is not None
        inputs: dict[str, list[Tensor]] = {}
        for feature, table in looked_up(self.features):
            rows = batch.features[feature.name]
            assert isinstance(rows, Tensor), "a value per token, as `resolve` has checked"
            inputs.setdefault(table, []).append(rows)
        negatives = [] if batch.negatives is None else [batch.negatives]
        items = TableIds([batch.items.values], [targets, *negatives])
        return {ITEM: items, **{table: TableIds(ids) for table, ids in inputs.items()}}

    def loss(self, sets: WorkingSets, batch: Batch, step: int, *, seed: int | None) -> Tensor:
        return self.token_losses(sets, batch, step, seed=seed).sum() / batch.num_trained_of_step

    def token_losses(self, sets: WorkingSets, batch: Batch, step: int, *, seed: int | None = None) -> Tensor:
        """Return the loss of every token that is trained on, [T] if these are all."""
        items = sets[ITEM]
        rows, index = items.for_inputs(batch.items.values.device)
        outputs = self.model.encode(rows, index, batch, seed=seed, features=self._feature_vectors(sets, batch))
        if batch.trained is not None:
            outputs = outputs.index_select(0, batch.trained)
        batch = batch.at_trained()
        loss_rows, candidates = items.for_loss()
        positives, others = candidates[: batch.num_tokens], candidates[batch.num_tokens :]
        negatives = None if batch.negatives is None else others.view(batch.negatives.shape)
        return self.objective.loss(outputs, loss_rows, positives, negatives, items.ids(), batch, step)

    def _feature_vectors(self, sets: WorkingSets, batch: Batch) -> dict[str, Tensor]:
        """Return the vectors of the tokens [T, width] by feature."""
        tables = dict.fromkeys(table for _, table in looked_up(self.features))
        vectors = sets.look_up_inputs(tables, batch.items.values.device)
        # Features that share a table stand one behind the other, as `ids` has put them.
        return {feature.name: vectors[table].pop(0) for feature, table in looked_up(self.features)}

    def is_due(self, step: int) -> bool:
        return self.objective.is_due(step)

    def refresh(self, tables: EmbeddingTables, step: int) -> None:
        self.objective.refresh(tables.gather(ITEM), step)

    def state(self) -> dict[str, Tensor]:
        return self.objective.state()

    def flops(self, lengths: Tensor) -> Flops:
        config = self.config
        strict = strict_flops(config.model, lengths, self.objective.num_scored, config.options)
        nominal = nominal_flops(config.model, lengths.numel(), config.options)
        projected = sum(weight.numel() for weight in self.model.feature_weights.values())
        return Flops(
            strict + 6 * projected * int(lengths.sum()), nominal + 6 * projected * lengths.numel() * self.model.max_len
        )

    def flops_of(self, batch: Batch) -> Flops:
        flops, lengths = super().flops_of(batch), batch.lengths_of_step
        not_scored = int(lengths.sum()) - batch.num_trained_of_step
        assert self.config.model.dim is not None, "the config is resolved"
        return flops._replace(
            strict=flops.strict - 6 * not_scored * (self.objective.num_scored + 1) * self.config.model.dim
        )

    @property
    def needs_step_targets(self) -> bool:
        return self.objective.needs_step_targets

    def encoder(self, tables: Mapping[str, Tensor]) -> TableEncoder:
        """Return the model with its whole tables, as vectors of users and items."""
        by_feature = {feature.name: tables[table] for feature, table in looked_up(self.features)}
        return TableEncoder(self.model, tables[ITEM], features=by_feature, columns=self.columns)

    def scorer(self, tables: Mapping[str, Tensor]) -> ModelScorer:
        """Return the model with its whole tables, for evaluation and recommendation."""
        return ModelScorer(self.encoder(tables), self.model.max_len)

    def own_scorer(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        should_stop: Callable[[], bool] | None = None,
    ) -> Scorer:
        """Return what the run itself has learnt, whatever it delivers; unseen items by their features, if they have
        any."""
        return self.scorer(self.tables_with_cold_items(tables, store, split))

    def tables_with_cold_items(self, tables: Mapping[str, Tensor], store: Store, split: Split) -> Mapping[str, Tensor]:
        """Return the tables, with vectors of items without a training event that are made from their features."""
        if not self.config.data.cold_items:
            return tables
        filled = with_cold_items(tables[ITEM], store, split.train_end)
        return tables if filled is tables[ITEM] else {**tables, ITEM: filled}

    def compared_methods(self) -> tuple[str, ...] | None:
        """Return the baselines that the run is compared with; None: all that can be fitted."""
        return self.config.evaluate.baselines

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
        batch_size: int | None = None,
        filter_last: int | None = None,
        filter_seen: bool | None = None,
        users: int | None = None,
    ) -> Evaluation:
        """As `Task.evaluate`.

        `batch_size`, `filter_seen` and `users` replace those of the config, `filter_last` is that of the evaluator.
        """
        return evaluate(
            self.own_scorer(tables, store, split, should_stop),
            store,
            split,
            part,
            batch_size=batch_size or self.config.evaluate.batch_size,
            filter_last=filter_last,
            progress=progress,
            should_stop=should_stop,
            world=world,
            **self._options(final, filter_seen, users),
        )

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
        filter_last: int | None = None,
        filter_seen: bool | None = None,
        users: int | None = None,
        **options: Any,
    ) -> dict[str, Measured]:
        options |= self._options(final, filter_seen, users)
        options |= {"should_stop": should_stop, "filter_last": filter_last}
        found = measure_baselines(store, split, part, **options)
        wanted = self.compared_methods()
        found = {name: system for name, system in found.items() if wanted is None or name in wanted}
        for name, chosen in self.simple_methods(store, split, should_stop).methods.items():
            if name not in found:
                found[name] = Measured.of(evaluate(chosen.scorer, store, split, part, **options))
        return found

    def simple_methods(self, store: Store, split: Split, should_stop: Callable[[], bool] | None = None) -> Selection:
        """Return the simple methods of `evaluate.baselines`, fitted on the training events.

        Their settings are chosen on the validation items by the run's own protocol, whatever is then measured.
        """
        key = store.manifest.content_hash, split.rule
        if key not in self._selections:
            names, stop = self.compared_methods(), should_stop
            seen_out = self._options(False, None)["filter_seen"]
            self._selections = {key: choose_methods(store, split, seen_out=seen_out, names=names, should_stop=stop)}
        return self._selections[key]

    def refused_baselines(self, store: Store, split: Split) -> dict[str, str]:
        return self.simple_methods(store, split).refused

    def deliver(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> Delivered:
        label, seen_out = self.model_name(self.config), self._options(False, None)["filter_seen"]
        self.delivered = Delivered(label)
        if self.config.deliver.choose == "best":
            methods = self.simple_methods(store, split, should_stop)
            model = self.own_scorer(tables, store, split, should_stop)
            self.delivered = choose_delivered(
                model, label, methods, store, split, seen_out=seen_out, should_stop=should_stop
            )
        return self.delivered

    def recommender(self, tables: Mapping[str, Tensor], store: Store, split: Split) -> Scorer:
        """Return what the run recommends with: the model unless `delivered` says otherwise."""
        if self.delivered is None or self.delivered.is_model:
            return self.own_scorer(tables, store, split)
        own = self.own_scorer(tables, store, split)
        if self._recommender is None or self._recommender[0] != self.delivered:
            selection = self._selections.get((store.manifest.content_hash, split.rule))
            fitted = {} if selection is None else selection.methods
            self._recommender = self.delivered, self.delivered.scorer(own, store, split, fitted=fitted)
        return self._recommender[1]

    def evaluate_delivered(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        part: str,
        *,
        final: bool = False,
        should_stop: Callable[[], bool] | None = None,
        filter_seen: bool | None = None,
        users: int | None = None,
        **options: Any,
    ) -> Evaluation | None:
        if self.delivered is None or self.delivered.is_model:
            return None
        options |= self._options(final, filter_seen, users)
        scorer = self.recommender(tables, store, split)
        return evaluate(scorer, store, split, part, should_stop=should_stop, **options)

    def coverage(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        part: str,
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> Coverage:
        scorer, filter_seen = self.recommender(tables, store, split), self.config.evaluate.excludes_seen
        sample = self.sample()
        return coverage(scorer, store, split, part, filter_seen=filter_seen, sample=sample, should_stop=should_stop)

    def samples(self, tables: Mapping[str, Tensor], store: Store, split: Split, part: str) -> dict[str, Any]:
        scorer, filter_seen = self.recommender(tables, store, split), self.config.evaluate.excludes_seen
        return sample_users(scorer, store, split, part, filter_seen=filter_seen, sample=self.sample())

    def sample(self, users: int | None = None) -> UserSample | None:
        config = self.config.evaluate
        num = users or config.users
        return None if num is None else UserSample(num, config.users_seed)

    def _options(self, final: bool, filter_seen: bool | None, users: int | None = None) -> dict[str, Any]:
        config = self.config.evaluate
        ks = _final_ks(config) if final else config.ks
        filter_seen = config.excludes_seen if filter_seen is None else filter_seen
        found = {"ks": ks, "filter_seen": filter_seen, "extra": extra_metrics(self.config)}
        sample = self.sample(users)
        return found if sample is None else {**found, "sample": sample}


def _final_ks(config: EvaluateConfig) -> tuple[int, ...]:
    """Return the cut-offs of a run's summary: the usual ones are always among them."""
    return tuple(sorted({*DEFAULT_KS, *config.ks}))
