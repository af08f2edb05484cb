"""What a run delivers: the trained model, a simple method, or a weighted sum of up to three of them.

The choice is made on the validation items. It is kept in the run folder as delivered.json: names, settings and
weights. Simple methods are fitted again when the run is opened, to the same digits, so nothing else is stored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.scorer import Scorer
from turbogr.files import replace_text
from turbogr.simple.methods import METHODS
from turbogr.simple.selection import ChosenMethod, Selection
from turbogr.simple.simple_method import Settings
from turbogr.simple.training_events import TrainingEvents
from turbogr.simple.validation import Validation, criterion
from turbogr.simple.weighted_sum import WeightedSum

DELIVERED = "delivered.json"
MODEL = "model"
MOST_COMPONENTS = 3
LEAST_GAIN = 0.01
"""By how much a further component must raise the criterion to be worth it, as a share."""

_SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8)


@dataclass(frozen=True)
class Component:
    """A part of what is delivered: `name` is MODEL or a simple method; its scores count `weight` times.

    `share` says how much it matters beside the others: its weight times the spread of its scores, as a share of all.
    """

    name: str
    weight: float = 1.0
    share: float = 1.0
    settings: Settings = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Delivered:
    """What a run recommends with; `label` names it for people, `values` are the criterion of all that was compared."""

    label: str
    components: tuple[Component, ...] = (Component(MODEL),)
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    chosen_on: str = ""

    @property
    def is_model(self) -> bool:
        """Whether the trained model alone is delivered."""
        return [component.name for component in self.components] == [MODEL]

    @property
    def needs_model(self) -> bool:
        return any(component.name == MODEL for component in self.components)

    def scorer(
        self,
        model: Scorer | None,
        store: Store,
        split: Split,
        should_stop: Callable[[], bool] | None = None,
        *,
        fitted: Mapping[str, ChosenMethod] | None = None,
    ) -> Scorer:
        """Return the scorer, with its simple methods fitted on the training events of the split.

        `fitted` are methods by name that have been fitted on them already; those with other settings are fitted again.
        """
        events: TrainingEvents | None = None
        scorers: list[Scorer] = []
        for component in self.components:
            known = (fitted or {}).get(component.name)
            if component.name == MODEL:
                assert model is not None, "the model is a part of what is delivered"
                scorers.append(model)
            elif known is not None and known.settings == component.settings:
                scorers.append(known.scorer)
            else:
                events = events or TrainingEvents.of(store, split)
                scorers.append(METHODS[component.name].fit(events, component.settings, should_stop))
        return _summed(scorers, [component.weight for component in self.components])

    def write(self, run: Path) -> None:
        """Write delivered.json."""
        replace_text(run / DELIVERED, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, run: Path, model_label: str) -> Delivered:
        """Read delivered.json; a run without one delivers its model.

        Raises:
            UserError: the file is damaged or names a method that this release does not have.
        """
        try:
            record = json.loads((run / DELIVERED).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(model_label)
        except (OSError, ValueError):
            raise _damaged(run) from None
        try:
            delivered = cls._of(record)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _damaged(run) from None
        return _checked(delivered, run)

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Delivered:
        components = tuple(
            Component(str(part["name"]), float(part["weight"]), float(part["share"]), _numbers(part["settings"]))
            for part in record["components"]
        )
        if not components or not all(math.isfinite(component.weight) for component in components):
            raise ValueError("nothing is delivered")
        return cls(str(record["label"]), components, _numbers(record["values"]), str(record["chosen_on"]))


def choose_delivered(
    model: Scorer | None,
    model_label: str,
    selection: Selection,
    store: Store,
    split: Split,
    *,
    seen_out: bool,
    should_stop: Callable[[], bool] | None = None,
) -> Delivered:
    """Choose what is best on the validation items: the model or a simple method, and what to add to it.

    The best single one comes first; then the component and share that raise the criterion most are added, as long as
    that is worth it. Without validation items the model is delivered: on the last training items, which it has learnt,
    it would be compared unfairly.

    Raises:
        Interrupted: `should_stop` returned True.
    """
    if not (split.valid >= 0).any():
        return Delivered(model_label, chosen_on="nothing: the split has no validation items")
    validation = Validation.of(store, split, seen_out=seen_out, should_stop=should_stop)
    pool = {name: _Sum.of(name, one.scorer, one.settings, one.value) for name, one in selection.methods.items()}
    if model is not None:
        pool = {MODEL: _Sum.of(MODEL, model, {}, criterion(validation.positions(model))), **pool}
    titles = {MODEL: model_label, **{name: method.title for name, method in METHODS.items()}}
    values = {titles[name]: single.value for name, single in pool.items()}
    best = max(pool.values(), key=lambda single: single.value)
    while len(best.components) < MOST_COMPONENTS:
        used = {component.name for component in best.components}
        sums = [found for name, single in pool.items() if name not in used for found in _sums(best, single, validation)]
        larger = max(sums, key=lambda found: found.value, default=best)
        if not larger.value > best.value * (1 + LEAST_GAIN):
            break
        best = larger
        values[best.label(titles)] = best.value
    return Delivered(best.label(titles), best.components, values, "the validation items")


@dataclass(frozen=True)
class _Sum:
    """A weighted sum of scorers with the criterion of it, `value`."""

    components: tuple[Component, ...]
    scorer: Scorer
    value: float

    @classmethod
    def of(cls, name: str, scorer: Scorer, settings: Settings, value: float) -> _Sum:
        return cls((Component(name, settings=settings),), scorer, value)

    def label(self, titles: Mapping[str, str]) -> str:
        if len(self.components) == 1:
            return titles[self.components[0].name]
        return " + ".join(f"{part.share:.0%} {titles[part.name]}" for part in self.components)


def _sums(best: _Sum, other: _Sum, validation: Validation) -> list[_Sum]:
    """Return the sums of what is best so far with another component, one for every share of the latter."""
    spreads = validation.spread(best.scorer), validation.spread(other.scorer)
    if not min(spreads) > 0:
        return []
    weights = [((1 - share) / spreads[0], share / spreads[1]) for share in _SHARES]
    positions = validation.positions_of_sums(best.scorer, other.scorer, weights)
    found = []
    for share, (first, second), ranked in zip(_SHARES, weights, positions, strict=True):
        kept = [dataclasses.replace(c, weight=c.weight * first, share=c.share * (1 - share)) for c in best.components]
        added = dataclasses.replace(other.components[0], weight=second, share=share)
        scorer = WeightedSum([best.scorer, other.scorer], [first, second])
        found.append(_Sum((*kept, added), scorer, criterion(ranked)))
    return found


def _summed(scorers: list[Scorer], weights: list[float]) -> Scorer:
    return scorers[0] if len(scorers) == 1 else WeightedSum(scorers, weights)


def _checked(delivered: Delivered, run: Path) -> Delivered:
    for component in delivered.components:
        if component.name == MODEL:
            continue
        if component.name not in METHODS:
            raise UserError(
                f"{run / DELIVERED} names the method '{component.name}', which this turbogr does not have; it has "
                f"{', '.join(METHODS)}. Use the release that wrote the run, or train again"
            )
        if component.settings.keys() != METHODS[component.name].choices(1).keys():
            raise _damaged(run)
    return delivered


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _damaged(run: Path) -> UserError:
    return UserError(f"{run / DELIVERED} is damaged; remove it to use the trained model alone, or train again")
