"""Choosing the settings of simple methods on the validation items."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.evaluation.scorer import Scorer
from turbogr.simple.methods import METHODS
from turbogr.simple.simple_method import LogFacts, Settings, SimpleMethod
from turbogr.simple.training_events import TrainingEvents
from turbogr.simple.validation import Validation, criterion


@dataclass(frozen=True)
class ChosenMethod:
    """A fitted method with the settings that were best on the validation items, and the criterion's `value` there.

    The value is NaN where there was nothing to choose on.
    """

    method: SimpleMethod
    settings: Settings
    scorer: Scorer
    value: float


@dataclass(frozen=True)
class Selection:
    """The chosen methods by name, in the usual order, and why others were not fitted; `chosen_on` ends a sentence."""

    methods: dict[str, ChosenMethod]
    refused: dict[str, str]
    chosen_on: str


def choose_methods(
    store: Store,
    split: Split,
    *,
    seen_out: bool,
    names: Iterable[str] | None = None,
    fixed: Mapping[str, Settings] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Selection:
    """Fit simple methods on the training events, each with the settings that are best on the validation items.

    `names` are the methods to fit (None: all). `fixed` are settings by method that are given and not chosen. Where the
    split has no validation items, the last training item of each user takes their place, and the chosen settings are
    then fitted on all training events. Where no user has two training items either, the usual settings are taken.

    Raises:
        Interrupted: `should_stop` returned True.
    """
    facts = LogFacts(store.num_users, store.num_items, store.num_events)
    wanted = [METHODS[name] for name in METHODS if names is None or name in set(names)]
    wanted = [method for method in wanted if not (method.needs_repeats and seen_out)]
    refused = {method.name: reason for method in wanted if (reason := method.refusal(facts)) is not None}
    fitted = [method for method in wanted if method.name not in refused]
    has_validation = bool((split.valid >= 0).any())
    inner = split if has_validation else hold_out_last(store, split)
    can_choose = bool((inner.valid >= 0).any())
    if not fitted:
        return Selection({}, refused, _chosen_on(has_validation, can_choose))
    validation = Validation.of(store, inner, seen_out=seen_out, should_stop=should_stop) if can_choose else None
    events = TrainingEvents.of(store, inner)
    found = {m.name: _search(m, events, validation, (fixed or {}).get(m.name, {}), should_stop) for m in fitted}
    if not has_validation:
        events = TrainingEvents.of(store, split)
        for name, chosen in found.items():
            scorer = chosen.method.fit(events, chosen.settings, should_stop)
            found[name] = dataclasses.replace(chosen, scorer=scorer)
    return Selection(found, refused, _chosen_on(has_validation, can_choose))


def _chosen_on(has_validation: bool, can_choose: bool) -> str:
    if has_validation:
        return "the validation items"
    return "the last training items" if can_choose else "nothing: no user has two training items"


def _search(
    method: SimpleMethod,
    events: TrainingEvents,
    validation: Validation | None,
    fixed: Settings,
    should_stop: Callable[[], bool] | None = None,
) -> ChosenMethod:
    """Choose one setting after the other, the others as they are best so far; without validation, the first of each."""
    choices = {**method.choices(events.num_items), **{name: (value,) for name, value in fixed.items()}}

    def measured(settings: Settings) -> ChosenMethod:
        scorer = method.fit(events, settings, should_stop)
        value = math.nan if validation is None else criterion(validation.positions(scorer))
        return ChosenMethod(method, settings, scorer, value)

    best = measured({name: values[0] for name, values in choices.items()})
    for name, values in choices.items():
        for value in values[1:] if validation is not None else ():
            tried = measured({**best.settings, name: value})
            if tried.value > best.value:
                best = tried
    return best


def hold_out_last(store: Store, split: Split) -> Split:
    """Return the split with the last training event of every user who has two as the validation event."""
    starts = np.asarray(store.offsets[:-1])
    enough = split.train_end - starts >= 2
    return dataclasses.replace(
        split, train_end=split.train_end - enough, valid=np.where(enough, split.train_end - 1, -1)
    )
