"""Some users' histories, their held-out items and what the model recommends to them, for a reader's eyes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluate.encoder import Encoder, encode_histories
from turbogr.evaluate.heldout import HeldOut
from turbogr.evaluate.metrics import MISSED
from turbogr.evaluate.ranking import target_ranks, top_k
from turbogr.files import replace_text
from turbogr.jagged import Jagged


def sample_users(
    encoder: Encoder,
    store: Store,
    split: Split,
    part: str = "test",
    *,
    max_len: int,
    num_users: int = 12,
    k: int = 10,
    num_history: int = 20,
    filter_seen: bool = True,
) -> dict[str, Any]:
    """Return the content of samples.json; candidates and ranks are those of `evaluate`, None for MISSED.

    The users stand at even steps of the history length, from short to long, so that a reader sees all kinds.
    """
    held_out = HeldOut.of(store, split, part)
    chosen = _spread(held_out.events - held_out.starts, num_users)
    users, starts, events = held_out.users[chosen], held_out.starts[chosen], held_out.events[chosen]
    targets = held_out.targets[chosen]

    queries = encode_histories(encoder, store, users, events, max_len)
    excluded = []
    for start, event in zip(starts, events, strict=True):
        seen = store.items[start:event].astype(np.int64)
        excluded.append(torch.from_numpy(seen if filter_seen else seen[:0]))
    gone = Jagged.from_rows(excluded).to(queries.device)
    ranks = target_ranks(queries, encoder, torch.from_numpy(targets).to(queries.device), gone).tolist()
    scores, rows = top_k(queries, encoder, k, gone)

    samples = []
    for place, event in enumerate(events):
        history = slice(max(int(starts[place]), int(event) - num_history), int(event))
        found = rows[place] >= 0
        samples.append(
            {
                "user": store.user_ids.decode(users[place : place + 1]).tolist()[0],
                "history": _entries(store, store.items[history], time=store.times[history].tolist()),
                "target": store.item_ids.decode(targets[place : place + 1]).tolist()[0],
                "target_time": int(store.times[event]),
                "target_rank": None if ranks[place] == MISSED else ranks[place],
                "recommendations": _entries(
                    store, rows[place][found].cpu().numpy(), score=scores[place][found].tolist()
                ),
            }
        )
    return {"users": samples}


def write_samples(path: Path | str, samples: Mapping[str, Any]) -> None:
    """Write samples.json; a reader sees the old file or the new one."""
    replace_text(path, json.dumps(samples, ensure_ascii=False, indent=1) + "\n")


def _spread(lengths: Int64Array, num: int) -> Int64Array:
    """Return the places of `num` of the users at even steps of their length, shortest first."""
    num = min(num, len(lengths))
    steps = ((np.arange(num) + 0.5) / num * len(lengths)).astype(np.int64)
    return np.argsort(lengths, kind="stable")[steps]


def _entries(store: Store, rows: Any, **column: list[Any]) -> list[dict[str, Any]]:
    ((name, values),) = column.items()
    items = store.item_ids.decode(rows).tolist()
    return [{"item": item, name: value} for item, value in zip(items, values, strict=True)]
