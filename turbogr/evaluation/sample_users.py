"""samples.json: histories, held-out items and recommendations of some users, for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr.data.item_info import ItemInfo
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.item_ranking import target_positions, top_k
from turbogr.evaluation.metrics import MISSED
from turbogr.evaluation.scorer import Scorer, no_step
from turbogr.evaluation.user_histories import StoreHistories
from turbogr.evaluation.user_sample import UserSample
from turbogr.files import replace_text
from turbogr.jagged import Jagged


def sample_users(
    scorer: Scorer,
    store: Store,
    split: Split,
    part: str = "test",
    *,
    num_users: int = 12,
    k: int = 10,
    num_history: int = 20,
    filter_seen: bool = True,
    sample: UserSample | None = None,
) -> dict[str, Any]:
    """Return the content of samples.json; candidates and positions are those of `evaluate`, None for MISSED.

    Users are taken at even steps of the order by history length, so that short and long histories are shown. Items have
    their titles where the store has them.
    """
    held_out = HeldOut.of(store, split, part, sample=sample)
    chosen = _spread(held_out.events - held_out.starts, num_users)
    users, starts, events = held_out.users[chosen], held_out.starts[chosen], held_out.events[chosen]
    targets = held_out.targets[chosen]

    found_scores = scorer.score(StoreHistories(store, users, events), no_step)
    seen_items = []
    for start, event in zip(starts, events, strict=True):
        seen = store.items[start:event].astype(np.int64)
        seen_items.append(torch.from_numpy(seen if filter_seen else seen[:0]))
    excluded = Jagged.from_rows(seen_items).to(found_scores.device)
    positions = target_positions(found_scores, torch.from_numpy(targets).to(found_scores.device), excluded).tolist()
    scores, rows = top_k(found_scores, k, excluded)

    info = ItemInfo.of(store)
    titles = [None] * len(targets) if info is None else info.titles(targets)
    samples = []
    for index, event in enumerate(events):
        history = slice(max(int(starts[index]), int(event) - num_history), int(event))
        found = rows[index] >= 0
        samples.append(
            {
                "user": store.user_ids.decode(users[index : index + 1]).tolist()[0],
                "history": _entries(store, info, store.items[history], time=store.times[history].tolist()),
                "target": store.item_ids.decode(targets[index : index + 1]).tolist()[0],
                **({} if titles[index] is None else {"target_title": titles[index]}),
                "target_time": int(store.times[event]),
                "target_rank": None if positions[index] == MISSED else positions[index],
                "recommendations": _entries(
                    store, info, rows[index][found].cpu().numpy(), score=scores[index][found].tolist()
                ),
            }
        )
    return {"users": samples}


def write_samples(path: Path | str, samples: Mapping[str, Any]) -> None:
    """Write samples.json, atomically."""
    replace_text(path, json.dumps(samples, ensure_ascii=False, indent=1) + "\n")


def _spread(lengths: Int64Array, num: int) -> Int64Array:
    """Return the indices of `num` users at even steps of the order by length, shortest first."""
    num = min(num, len(lengths))
    steps = ((np.arange(num) + 0.5) / num * len(lengths)).astype(np.int64)
    return np.argsort(lengths, kind="stable")[steps]


def _entries(store: Store, info: ItemInfo | None, rows: Any, **column: list[Any]) -> list[dict[str, Any]]:
    ((name, values),) = column.items()
    items = store.item_ids.decode(rows).tolist()
    titles = [None] * len(items) if info is None else info.titles(rows)
    return [
        {"item": item, name: value} if title is None else {"item": item, "title": title, name: value}
        for item, title, value in zip(items, titles, values, strict=True)
    ]
