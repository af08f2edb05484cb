"""Logs for the tests of this folder: random ones, and a plain-Python definition of what preparing must give."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from turbogr.data.store import Store

Event = tuple[Any, Any, int]


def write_csv(path: Path, events: list[Event], header: str = "user_id,item_id,timestamp") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, event)) for event in events)]) + "\n", encoding="utf-8")
    return path


def random_events(num_events: int, num_users: int, num_items: int, seed: int, span: int = 10**6) -> list[Event]:
    """Events in no order, with ties in time and repeated rows."""
    random = np.random.default_rng(seed)
    users = random.integers(0, num_users, num_events) * 7 - 5
    items = (num_items * random.random(num_events) ** 2).astype(np.int64) * 3 + 1
    times = random.integers(0, span, num_events)
    return list(zip(users.tolist(), items.tolist(), times.tolist(), strict=True))


def expected_sequences(
    events: list[Event], min_user_events: int = 1, min_item_events: int = 1, duplicates: str = "keep"
) -> dict[Any, list[tuple[Any, int]]]:
    """User -> [(item, time)] as the store must hold them: the definition, without any care for speed."""
    ordered = sorted(enumerate(events), key=lambda pair: (pair[1][0], pair[1][2], pair[0]))
    rows = [event for _, event in ordered]
    if duplicates != "keep":
        seen, fresh = set(), []
        for row in rows:
            key = row if duplicates == "exact" else row[:2]
            if key not in seen:
                fresh.append(row)
            seen.add(key)
        rows = fresh
    while True:
        users, items = Counter(row[0] for row in rows), Counter(row[1] for row in rows)
        left = [row for row in rows if users[row[0]] >= min_user_events and items[row[1]] >= min_item_events]
        if len(left) == len(rows):
            break
        rows = left
    sequences: dict[Any, list[tuple[Any, int]]] = {}
    for user, item, time in rows:
        sequences.setdefault(user, []).append((item, time))
    return sequences


def stored_sequences(store: Store) -> dict[Any, list[tuple[Any, int]]]:
    """The content of a store in the same form; users without events are left out."""
    users = store.user_ids.decode(np.arange(store.num_users)).tolist()
    items = store.item_ids.decode(store.items).tolist()
    times = store.times.tolist()
    bounds = store.offsets.tolist()
    return {
        user: list(zip(items[a:b], times[a:b], strict=True))
        for user, a, b in zip(users, bounds[:-1], bounds[1:], strict=True)
        if a < b
    }


def bytes_of(store: Store) -> dict[str, bytes]:
    """Every file of a store."""
    return {file.name: file.read_bytes() for file in sorted(store.path.iterdir())}
