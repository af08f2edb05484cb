"""Settings that follow from the size of the data, where a recipe says `defaults: from-data`.

Only what neither the recipe nor `--set` gives is filled in.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from turbogr.config.schema import Config

FULL_SOFTMAX_WORK = 5e8
"""Most training events × items for which the loss is computed against all items: some seconds an epoch on two cores."""

SMALL = 300_000
"""Training events below which a log counts as small."""

_SAMPLER_SETTINGS = (
    "loss.sampler",
    "loss.num_negatives",
    "loss.shares",
    "loss.expansion",
    "loss.sharing",
    "loss.segment_mb",
)


class DataSize(NamedTuple):
    """What of the data decides: items, training sequences (users) and training events."""

    num_items: int
    num_sequences: int
    num_events: int


def fill_from_data(config: Config, size: DataSize) -> Config:
    """Return a copy with the settings that follow from the data; it says `defaults: fixed`, so they stay.

    A config that already says so is returned as it is.
    """
    if config.defaults != "from-data":
        return config
    chosen = {key: value for key, value in settings_for(config, size).items() if key not in config.given}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return dataclasses.replace(config, defaults="fixed")


def settings_for(config: Config, size: DataSize) -> dict[str, Any]:
    """Return every setting that the data decide, by its key.

    Few events need strong dropout and a soft loss, many events little of both. All items are compared where that is
    affordable, unless a setting of a sampler is given.
    """
    names_sampler = any(key in config.given for key in _SAMPLER_SETTINGS)
    full = not names_sampler and size.num_events * size.num_items <= FULL_SOFTMAX_WORK
    small = size.num_events < SMALL
    name = config.loss.name if "loss.name" in config.given else "full-softmax" if full else "sampled-softmax"
    return {
        "model.dropout": 0.5 if small else 0.3,
        "loss.name": name,
        **({} if name == "full-softmax" else {"loss.num_negatives": 512}),  # it draws none, and none may be set
        "loss.temperature": 0.1 if small else 0.05,
    }
