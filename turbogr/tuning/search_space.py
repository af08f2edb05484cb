"""Which settings are tried: the recipe itself, then draws from a short list of values of the few that matter."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from turbogr.config import Config, LossConfig, flat_config

MOST_TRIALS = 64
FULL_SOFTMAX_WORK = 2e9
"""Most training events × items for which the loss against all items is tried: it is computed for every event."""

_KEPT = 0.5  # probability that a trial leaves a setting as the recipe has it

Settings = tuple[tuple[str, str], ...]
"""Settings that differ from the recipe, as (key, value)."""


def settings_to_try(config: Config, num_items: int, num_events: int, fixed: Collection[str] = ()) -> Iterator[Settings]:
    """Yield the settings of one trial after the other, no two the same; the first is the recipe itself.

    `config` is the resolved recipe; `fixed` are keys that the user has set, which stay. The n-th trial is always the
    same, however many there are.
    """
    choices = _choices(config, num_items, num_events, fixed)
    generator = random.Random(0)
    seen: set[Settings] = set()
    current: Settings = ()
    for _ in range(100 * MOST_TRIALS):
        if current not in seen:
            seen.add(current)
            yield current
        if len(seen) == MOST_TRIALS or not choices:
            return
        drawn = [generator.choice(values) for values in choices if generator.random() >= _KEPT]
        current = tuple(setting for option in drawn for setting in option)


def _choices(config: Config, num_items: int, num_events: int, fixed: Collection[str]) -> list[list[Settings]]:
    """Return for every setting the values that differ from the recipe's; the loss and its negatives go together."""
    now = flat_config(config)
    listed: list[list[Settings]] = [
        [(("model.name", name),) for name in ("hstu", "sasrec", "fuxi-alpha")],
        [(("model.dropout", value),) for value in ("0.1", "0.2", "0.35", "0.5")],
        [(("optimizer.lr", value),) for value in ("0.0005", "0.001", "0.002", "0.004")],
        [(("loss.name", "sampled-softmax"), ("loss.num_negatives", number)) for number in ("128", "512")],
        [(("loss.temperature", value),) for value in ("0.05", "0.1")],
        [(("data.window", value),) for value in ("last", "split")],
        [(("model.num_blocks", number),) for number in ("1", "2", "4")],
        [(("model.dim", number),) for number in ("32", "64", "128")],
    ]
    if num_items * num_events <= FULL_SOFTMAX_WORK:
        # Negatives have no meaning for it; another number than the default is refused.
        listed[3].append((("loss.name", "full-softmax"), ("loss.num_negatives", f"{LossConfig().num_negatives}")))
    found = []
    for options in listed:
        if any(key in fixed for option in options for key, _ in option):
            continue
        other = [option for option in options if not _is_current(option, now)]
        if other:
            found.append(other)
    return found


def _is_current(option: Settings, now: Mapping[str, Any]) -> bool:
    """Whether the recipe has these settings already; negatives count only where they are drawn."""
    if ("loss.name", "full-softmax") in option:
        return bool(now["loss.name"] == "full-softmax")
    return all(_is(now[key], value) for key, value in option)


def _is(current: Any, value: str) -> bool:
    """Whether a setting has this value already."""
    if isinstance(current, int | float):
        return float(value) == float(current)
    return str(current) == value
