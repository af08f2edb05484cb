"""Retrieval by a simple method: measured and delivered like a network, but fitted instead of trained step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from turbogr.config import Config
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.baseline_titles import TITLES
from turbogr.evaluation.scorer import Scorer
from turbogr.models.table_encoder import TableEncoder
from turbogr.simple.delivery import Delivered
from turbogr.simple.method_settings import fixed_settings
from turbogr.simple.methods import METHODS
from turbogr.simple.selection import ChosenMethod, choose_methods
from turbogr.simple.training_events import TrainingEvents
from turbogr.tables.embedding_tables import TableSpec
from turbogr.tasks.retrieval import RetrievalTask


class MethodTask(RetrievalTask):
    """The retrieval task of a run whose `model.name` is a simple method. It has neither tables nor parameters."""

    def __init__(self, config: Config) -> None:
        assert config.method is not None, f"{config.model.name} is not a simple method"
        self.config, self.method = config, METHODS[config.method]
        self.tables: list[TableSpec] = []
        self.features, self.columns = [], {}
        self.model = nn.Module()  # type: ignore[assignment]
        self.delivered: Delivered | None = None
        self._selections, self._recommender = {}, None
        self._fitted: tuple[Any, Scorer] | None = None

    def model_name(self, config: Config) -> str:
        return self.method.name

    def compared_methods(self) -> tuple[str, ...]:
        """As the base class; a method is not compared with itself."""
        wanted = self.config.evaluate.baselines
        return tuple(name for name in (TITLES if wanted is None else wanted) if name != self.method.name)

    def choose(self, store: Store, split: Split, should_stop: Callable[[], bool] | None = None) -> ChosenMethod:
        """Fit the method with the settings of the config, those that are unset chosen on the validation items.

        Raises:
            UserError: the method cannot be fitted on such a log, or recommends nothing that may be recommended.
            Interrupted: `should_stop` returned True.
        """
        name, seen_out = self.method.name, self.config.evaluate.excludes_seen
        if self.method.needs_repeats and seen_out:
            raise UserError(
                f"{name} recommends items that the user has had before, and these are left out of the candidates "
                "(evaluate.filter_seen); set evaluate.filter_seen=false, or choose another model.name"
            )
        fixed = fixed_settings(name, self.config.options)
        found = choose_methods(
            store, split, seen_out=seen_out, names=[name], fixed={name: fixed}, should_stop=should_stop
        )
        if name in found.refused:
            raise UserError(f"{found.refused[name]}; choose another model.name")
        self._fitted = self._key(store, split), found.methods[name].scorer
        return found.methods[name]

    def own_scorer(
        self,
        tables: Mapping[str, Tensor],
        store: Store,
        split: Split,
        should_stop: Callable[[], bool] | None = None,
    ) -> Scorer:
        """As the base class: the method, fitted on the training events, to the same digits every time."""
        key = self._key(store, split)
        if self._fitted is None or self._fitted[0] != key:
            settings = fixed_settings(self.method.name, self.config.options)
            self._fitted = key, self.method.fit(TrainingEvents.of(store, split), settings, should_stop)
        return self._fitted[1]

    def encoder(self, tables: Mapping[str, Tensor]) -> TableEncoder:
        """Raise UserError: a simple method has no vectors."""
        raise UserError(f"a run of {self.method.name} has no vectors of users and items; it can only recommend")

    def _key(self, store: Store, split: Split) -> Any:
        return store.manifest.content_hash, split.rule
