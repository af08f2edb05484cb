"""Features and actions of the synthetic log: what items and users are like, and what users do with what they are shown.

An item has a tag, an author, a length and a quality; a user has an age group, a city and a taste. Taste is an affinity
to each tag, of which a part belongs to the age group and a part to the user alone. Whether an item is clicked depends
on the taste for its tag, on the item's quality, on how readily the user clicks, and on the tab in which it is shown;
whether it is then watched long depends on its length and the user's patience, and on taste again. So id rates explain a
part, features another, and what a user did with items of the same tag before a third.

Every quantity is a hash of (seed, user, item), as in the log itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turbogr.data.prepare.sources.event_generator import Events, Synthetic, hash_words, normal, scatter, uniform
from turbogr.data.vocabulary import Int64Array

ACTIONS = ("is_click", "long_view")
EVENT_FEATURES = ("tab",)
COLUMNS = (*ACTIONS, *EVENT_FEATURES)

_TAGS = ("music", "sports", "games", "food", "trips", "news", "pets", "cars", "fashion", "comedy", "science", "films")
_CITIES = ("north", "south", "east", "west", "abroad")
_AGES = 5
_TABS = 4
_TAB_EFFECT = np.array([0.0, 0.7, -0.6, 0.2])


def event_columns(settings: Synthetic, events: Events) -> dict[str, pa.Array]:
    """Return the columns of `COLUMNS` for a block of the log."""
    with np.errstate(over="ignore"):
        clicks, views, tabs = _actions(settings, events)
    return {"is_click": pa.array(clicks), "long_view": pa.array(views), "tab": pa.array(tabs)}


def item_table(settings: Synthetic) -> pa.Table:
    """Return a record per item of the catalogue."""
    items = np.arange(settings.num_items, dtype=np.int64)
    with np.errstate(over="ignore"):
        tags, seconds = _tags(settings, items), _seconds(settings, items)
        second = _uniform_of(settings, 23, items) < 0.3
        other = (_words(settings, 24, items) % np.uint64(len(_TAGS))).astype(np.int64)
    names = np.array(_TAGS)
    both = np.where(second & (other != tags), np.char.add(np.char.add(names[tags], "|"), names[other]), names[tags])
    columns = {
        "item_id": pa.array(scatter(items, settings.num_items, 1)),
        "tags": pa.array(both.tolist()),
        "author_id": pa.array(_series(settings, items)),
        "seconds": pa.array(np.round(seconds, 1)),
    }
    return pa.table(columns)


def user_table(settings: Synthetic) -> pa.Table:
    """Return a record per user."""
    users = np.arange(settings.num_users, dtype=np.int64)
    with np.errstate(over="ignore"):
        cities = (_words(settings, 31, users) % np.uint64(len(_CITIES))).astype(np.int64)
        days = 30 * np.exp(normal(_words(settings, 32, users)))
    columns = {
        "user_id": pa.array(users),
        "age_group": pa.array(_ages(settings, users)),
        "city": pa.array(np.array(_CITIES)[cities].tolist()),
        "days_since_joining": pa.array(np.round(days, 1)),
    }
    return pa.table(columns)


def _actions(s: Synthetic, events: Events) -> tuple[NDArray[np.int8], NDArray[np.int8], Int64Array]:
    users, items = events.users, _unscattered(events.items, s.num_items)
    tags, ages = _tags(s, items), _ages(s, users)
    taste = 1.1 * normal(_words(s, 41, ages, tags)) + 1.3 * normal(_words(s, 42, users, tags))
    chance = _uniform_of(s, 43, users, items, events.times)
    tabs = (_words(s, 44, users, events.times // 1800) % np.uint64(_TABS)).astype(np.int64)
    ready, quality = 0.8 * normal(_words(s, 45, users)), 0.8 * normal(_words(s, 46, items))
    clicks = chance < _sigmoid(-0.4 + taste + ready + quality + _TAB_EFFECT[tabs])
    patience = 40 * np.exp(0.5 * normal(_words(s, 47, users)))
    stays = _uniform_of(s, 48, users, items, events.times) < _sigmoid(
        0.5 + 0.6 * taste - 1.2 * np.log(_seconds(s, items) / patience)
    )
    return clicks.astype(np.int8), (clicks & stays).astype(np.int8), tabs


def _words(s: Synthetic, stream: int, *keys: Any) -> Any:
    return hash_words(s.seed, stream, *keys)


def _uniform_of(s: Synthetic, stream: int, *keys: Any) -> Any:
    return uniform(_words(s, stream, *keys))


def _series(s: Synthetic, items: Int64Array) -> Int64Array:
    return items // s.episodes


def _tags(s: Synthetic, items: Int64Array) -> Int64Array:
    tags: Int64Array = (_words(s, 21, _series(s, items)) % np.uint64(len(_TAGS))).astype(np.int64)
    return tags


def _seconds(s: Synthetic, items: Int64Array) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = 5 + 30 * np.exp(0.7 * normal(_words(s, 22, items)))
    return seconds


def _ages(s: Synthetic, users: Int64Array) -> Int64Array:
    ages: Int64Array = (_words(s, 30, users) % np.uint64(_AGES)).astype(np.int64)
    return ages


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _unscattered(raw: Int64Array, num: int) -> Int64Array:
    """Return the indices in the catalogue of raw item ids: the inverse of `scatter`."""
    step = int(scatter(np.array([1]), num, 1)[0] - scatter(np.array([0]), num, 1)[0]) % num
    return (raw - 7919) % num * pow(step, -1, num) % num if num > 1 else raw * 0
