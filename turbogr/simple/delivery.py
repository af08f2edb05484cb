"""What a run delivers: the trained model, a simple method, or a weighted sum of several.

The choice is made on the validation items. It is kept in the run folder as delivered.json: names, settings and
weights. Simple methods are fitted again when the run is opened, to the same digits, so nothing else is stored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.scorer import Scorer
from turbogr.files import replace_text
from turbogr.simple.methods import METHODS
from turbogr.simple.selection import ChosenMethod, Selection
from turbogr.simple.simple_method import Settings
from turbogr.simple.training_events import TrainingEvents
from turbogr.simple.validation import Validation, criterion, gains, standard_error
from turbogr.simple.weight_search import search_shares
from turbogr.simple.weighted_sum import WeightedSum

DELIVERED = "delivered.json"
MODEL = "model"
LEAST_GAIN = 0.01
"""By how much a sum must raise the criterion of the best single one, as a share, up to one standard error."""
MODEL_OPTIMISM = 0.9
"""The model's criterion counts this much in the prior of a sum: its epoch was chosen on the same validation items."""
SCALE = 0.3
"""Scores of simple methods are compressed from this share of their mean size on."""

_NAMED = 3  # components that a label names


@dataclass(frozen=True)
class Component:
    """A part of what is delivered: `name` is MODEL or a simple method; its scores count `weight` times.

    With a `scale` they are compressed first (`weighted_sum.py`). `share` says how much it matters beside the others:
    its weight times the spread of its scores, as a share of all.
    """

    name: str
    weight: float = 1.0
    share: float = 1.0
    settings: Settings = dataclasses.field(default_factory=dict)
    scale: float | None = None


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
        return _summed(scorers, self.components)

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
            Component(
                str(part["name"]),
                float(part["weight"]),
                float(part["share"]),
                _numbers(part["settings"]),
                None if part.get("scale") is None else float(part["scale"]),
            )
            for part in record["components"]
        )
        if not components or not all(math.isfinite(component.weight) for component in components):
            raise ValueError("nothing is delivered")
        if not all(component.scale is None or 0 < component.scale < math.inf for component in components):
            raise ValueError("a scale is not a positive number")
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
    """Choose what is best on the validation items: the model, a simple method, or a weighted sum of them.

    Without validation items the model is delivered: on the last training items, which it has learnt, it would be
    compared unfairly.

    Raises:
        Interrupted: `should_stop` returned True.
    """
    if not (split.valid >= 0).any():
        return Delivered(model_label, chosen_on="nothing: the split has no validation items")
    validation = Validation.of(store, split, seen_out=seen_out, should_stop=should_stop)
    pool = {name: _Single(one.scorer, one.settings, one.value) for name, one in selection.methods.items()}
    if model is not None:
        pool = {MODEL: _Single(model, {}, criterion(validation.positions(model))), **pool}
    titles = {MODEL: model_label, **{name: method.title for name, method in METHODS.items()}}
    values = {titles[name]: single.value for name, single in pool.items()}
    best = max(pool, key=lambda name: pool[name].value)
    components: tuple[Component, ...] = (Component(best, settings=pool[best].settings),)
    if found := _best_sum(pool, validation):
        summed = gains(validation.positions(_summed([pool[part.name].scorer for part in found], found)))
        values[label_of(found, titles)] = float(summed.mean())
        # The best of many single ones is partly best by luck, more so the fewer users there are.
        alone = gains(validation.positions(pool[best].scorer))
        if (summed - alone).mean() + standard_error(summed - alone) > LEAST_GAIN * alone.mean():
            components = found
    return Delivered(label_of(components, titles), components, values, "the validation items")


class _Single(NamedTuple):
    """A scorer alone with its value of the criterion."""

    scorer: Scorer
    settings: Settings
    value: float


def _best_sum(pool: Mapping[str, _Single], validation: Validation) -> tuple[Component, ...]:
    """Return the components of the best sum, the largest share first; nothing where one scorer has it all."""
    parts = {name: (single, _compression(name, single.scorer, validation)) for name, single in pool.items()}
    # Without any spread all items have the same score, and nothing can be gained by adding it.
    parts = {name: part for name, part in parts.items() if part[1].spread > 0 and part[0].value > 0}
    if len(parts) < 2:
        return ()
    scorers = [WeightedSum([single.scorer], [1.0], [how.scale]) for single, how in parts.values()]
    shares = search_shares(
        scorers,
        [single.value * (MODEL_OPTIMISM if name == MODEL else 1.0) for name, (single, _) in parts.items()],
        [how.spread for _, how in parts.values()],
        validation,
    )
    found = [
        Component(name, share / how.spread, share, single.settings, how.scale)
        for (name, (single, how)), share in zip(parts.items(), shares, strict=True)
        if share > 0
    ]
    return tuple(sorted(found, key=lambda part: -part.share)) if len(found) > 1 else ()


class _Compression(NamedTuple):
    """By which scale scores are compressed (None: not at all), and their spread then."""

    scale: float | None
    spread: float


def _compression(name: str, scorer: Scorer, validation: Validation) -> _Compression:
    """The model's scores are logarithms of probabilities up to a factor and stay as they are."""
    scale = None if name == MODEL else SCALE * validation.size(scorer) or None
    return _Compression(scale, validation.spread(WeightedSum([scorer], [1.0], [scale])))


def label_of(components: Sequence[Component], titles: Mapping[str, str]) -> str:
    """Return what the components are called together; the largest are named with their shares."""
    if len(components) == 1:
        return titles[components[0].name]
    named = [f"{part.share:.0%} {titles[part.name]}" for part in components[:_NAMED]]
    more = len(components) - _NAMED
    return " + ".join(named) + (f" + {more} more" if more > 0 else "")


def _summed(scorers: list[Scorer], components: Sequence[Component]) -> Scorer:
    if len(scorers) == 1:
        return scorers[0]
    weights, scales = [part.weight for part in components], [part.scale for part in components]
    return WeightedSum(scorers, weights, scales)


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
