"""Settings that follow from the size of the data, where a recipe says `defaults: from-data`.

Only what neither the recipe nor `--set` gives is filled in.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from turbogr.config.schema import Config

FULL_SOFTMAX_WORK = 1e9
"""Most training events × items for which the loss is computed against all items: some seconds an epoch on two cores."""

SMALL = 300_000
"""Training events below which a log counts as small."""

LONGEST_WINDOW = 512

TRAINING_SECONDS = 60.0
"""About how long training takes on two cores, without evaluations, unless that were too few epochs."""

FEWEST_EPOCHS, MOST_EPOCHS = 16, 60

_EVENT_SECONDS = 12e-6  # a training event with sampled negatives, on two cores
_FULL_EVENT_SECONDS, _PAIR_SECONDS = 3e-6, 2.5e-9  # with full softmax: the model, and the loss per item

WEAK_POPULARITY, STRONG_POPULARITY = 0.35, 0.65
"""Popularity strengths up to which a log counts as one of sharp tastes, and from which as one of vague tastes."""

_SAMPLER_SETTINGS = (
    "loss.sampler",
    "loss.num_negatives",
    "loss.shares",
    "loss.expansion",
    "loss.sharing",
    "loss.segment_mb",
)


class DataFacts(NamedTuple):
    """What of the data decides: items, training sequences (users) and training events.

    The `covering_length` newest events of every user are 95 % of the latter, and no user has more than
    `longest_length`. `popularity_strength` is how good the most popular items are as a recommendation, as a share of
    what a Markov chain over skips reaches (None: not measured). `reachable_events` are those among the LONGEST_WINDOW
    newest of their user (None: all).
    """

    num_items: int
    num_sequences: int
    num_events: int
    covering_length: int
    longest_length: int
    popularity_strength: float | None = None
    reachable_events: int | None = None


def fill_from_data(config: Config, facts: DataFacts) -> Config:
    """Return a copy with the settings that follow from the data; it says `defaults: fixed`, so they stay.

    A config that already says so is returned as it is.
    """
    if config.defaults != "from-data":
        return config
    chosen = {key: value for key, value in settings_for(config, facts).items() if key not in config.given}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return dataclasses.replace(config, defaults="fixed")


def settings_for(config: Config, facts: DataFacts) -> dict[str, Any]:
    """Return every setting that the data decide, by its key.

    Few events need strong dropout and a soft loss, many events little of both. Where popularity explains most of what
    can be predicted, tastes are vague and the loss is softer still. All items are compared where that is affordable,
    unless a setting of a sampler is given. Epochs follow from the work of one.
    """
    names_sampler = any(key in config.given for key in _SAMPLER_SETTINGS)
    full = not names_sampler and facts.num_events * facts.num_items <= FULL_SOFTMAX_WORK
    small = facts.num_events < SMALL
    name = config.loss.name if "loss.name" in config.given else "full-softmax" if full else "sampled-softmax"
    return {
        "model.max_len": _max_len(facts),
        "model.dropout": 0.5 if small else 0.3,
        "loss.name": name,
        **({} if name == "full-softmax" else {"loss.num_negatives": 512}),  # it draws none, and none may be set
        "loss.temperature": _temperature(facts, small=small),
        **({} if "train.steps" in config.given else {"train.epochs": _epochs(config, facts, loss=name)}),
    }


def _max_len(facts: DataFacts) -> int:
    """The next power of two that covers 95 % of the training events, between 16 and LONGEST_WINDOW, but not above the
    longest history."""
    wanted = 1 << (max(1, facts.covering_length) - 1).bit_length()
    return max(2, min(LONGEST_WINDOW, facts.longest_length, max(16, wanted)))


def _temperature(facts: DataFacts, *, small: bool) -> float:
    strength = facts.popularity_strength or 0.0
    if not small:
        return 0.05
    return 0.1 if strength < WEAK_POPULARITY else 0.15 if strength < STRONG_POPULARITY else 0.2


def _epochs(config: Config, facts: DataFacts, *, loss: str) -> int:
    events = facts.num_events
    if config.data.window != "split" and facts.reachable_events is not None:
        events = facts.reachable_events  # the others are never trained on
    each = _FULL_EVENT_SECONDS + _PAIR_SECONDS * facts.num_items if loss == "full-softmax" else _EVENT_SECONDS
    return min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(TRAINING_SECONDS / (each * max(1, events)))))
