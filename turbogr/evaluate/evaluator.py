"""Evaluation of a model on the held-out items of a split, and the files that keep the result.

Every held-out item is ranked over the whole catalogue; none is sampled and none is dropped. The numbers do not depend
on the batch size or the number of threads, to the last digit: users are taken in store order, in tiles that are fixed
by their place among the held-out users, for encoding as for scoring; a tile is computed by one thread, and the batch
size only says how many tiles share a pass over the catalogue. For the same reason many ranks may share the tiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluate.baselines import markov_ranks, popularity_ranks
from turbogr.evaluate.encoder import Encoder, batches_of, encode_histories, num_workers_of
from turbogr.evaluate.heldout import HeldOut
from turbogr.evaluate.metrics import DEFAULT_KS, MISSED, REPEATED, ranking_metrics
from turbogr.evaluate.ranking import ItemVectors, held_queries, target_ranks
from turbogr.evaluate.workers import Interrupted, Step, run_jobs
from turbogr.files import replace_text
from turbogr.jagged import Jagged
from turbogr.parallel.world import World

__all__ = [
    "Encoder",
    "Evaluation",
    "Interrupted",
    "baseline_metrics",
    "evaluate",
    "write_evaluation",
]

Metrics = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """The result on one part: `metrics`, and `ranks` [n] of the held-out items of `users` [n] (rows of the store).

    A held-out item that the filter took from the candidates has the rank MISSED. `skipped` counts the other users of
    the store by reason; `protocol` says in one sentence what was measured.
    """

    part: str
    metrics: Metrics
    users: Int64Array
    ranks: Int64Array
    skipped: dict[str, int]
    protocol: str

    @property
    def num_users(self) -> int:
        return len(self.users)


def evaluate(
    encoder: Encoder,
    store: Store,
    split: Split,
    part: str = "test",
    *,
    max_len: int,
    ks: Sequence[int] = DEFAULT_KS,
    filter_seen: bool = True,
    filter_last: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    world: World | None = None,
) -> Evaluation:
    """Rank the held-out item of every user of `part` ("valid" or "test") against the whole catalogue.

    A user's query is the encoding of the last `max_len` events before the held-out one; with `filter_seen` the items of
    the user's earlier events are no candidates, all or, with `filter_last`, the newest so many; a held-out item that is
    among them counts as missed. `batch_size` users
    (rounded up to whole tiles) share one pass over the catalogue; unset, it follows from the size of the catalogue.
    `progress` is called with the number of users encoded since the last call. With a `world` of many ranks all call it
    together, each ranks its part of the users, and all return the whole result.

    Raises:
        Interrupted: `should_stop` returned True, on any rank; it is asked several times a second.
        UserError: the split holds nothing out for this part, or a score is not a finite number.
    """
    held_out = HeldOut.of(store, split, part, filter_last=filter_last)
    targets = torch.from_numpy(held_out.targets)

    def rank(chosen: slice, step: Step) -> Int64Array:
        users, events = held_out.users[chosen], held_out.events[chosen]
        queries = encode_histories(encoder, store, users, events, max_len, step=step)
        seen = _seen(held_out, chosen, queries.device) if filter_seen else None
        items = _StoppableItems(encoder, step)
        ranks: Int64Array = target_ranks(queries, items, targets[chosen].to(queries.device), seen).cpu().numpy()
        return ranks

    num_workers, world = num_workers_of(encoder), world or World()
    if batch_size is None:
        batch_size = min(held_queries(encoder.num_items), -(-len(held_out) // (4 * num_workers * world.size)))
    jobs = batches_of(len(held_out), batch_size)

    def rank_my_part() -> list[Int64Array] | None:
        mine = jobs[world.rank :: world.size]
        try:
            return list(run_jobs(rank, mine, num_workers=num_workers, progress=progress, should_stop=should_stop))
        except Interrupted:
            return None

    parts = world.gather_objects(world.together(rank_my_part))
    ranks = np.empty(len(held_out), np.int64)
    for number, part_of_rank in enumerate(parts):
        if part_of_rank is None:
            raise Interrupted("interrupted before all users were done")
        for job, found in zip(jobs[number :: world.size], part_of_rank, strict=True):
            ranks[job] = found
    return Evaluation(
        part=part,
        metrics=ranking_metrics(ranks, ks),
        users=held_out.users,
        ranks=ranks,
        skipped=held_out.skipped,
        protocol=_protocol(store, split, part, filter_seen, filter_last, int((ranks == MISSED).sum())),
    )


def _protocol(
    store: Store, split: Split, part: str, filter_seen: bool, filter_last: int | None, num_repeated: int
) -> str:
    """Say in one sentence what the metrics of `part` measure."""
    item = "validation item" if part == "valid" else "test item"
    newest = "" if filter_last is None else f"last {filter_last} "
    seen = f"without the user's {newest}earlier items" if filter_seen else "the user's earlier items included"
    if num_repeated:
        seen += f"; {num_repeated:,} {item}{'s were' if num_repeated > 1 else ' was'} among these and counted as missed"
    ties = "; events at the same time are in random order" if (store.manifest.ties or ("",))[0] == "random" else ""
    return f"{split.describe()}{ties}; the {item} is ranked against all {store.num_items:,} items, {seen}"


def baseline_metrics(
    store: Store,
    split: Split,
    part: str = "test",
    *,
    ks: Sequence[int] = DEFAULT_KS,
    filter_seen: bool = True,
    filter_last: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Metrics]:
    """Return the metrics of "popularity" and "markov" on the same users, candidates and filter as `evaluate`."""
    held_out = HeldOut.of(store, split, part, filter_last=filter_last)
    counts = store.item_counts(split.train_end)

    def stop() -> None:
        if should_stop is not None and should_stop():
            raise Interrupted("interrupted before the baselines were measured")

    popular = popularity_ranks(held_out, counts, filter_seen=filter_seen, stop=stop)
    markov = markov_ranks(held_out, split, counts, filter_seen=filter_seen, stop=stop)
    return {"popularity": ranking_metrics(popular, ks), "markov": ranking_metrics(markov, ks)}


def write_evaluation(
    path: Path | str,
    parts: Mapping[str, Mapping[str, Metrics]],
    *,
    num_users: int,
    protocol: str,
    step: int | None = None,
    epoch: float | None = None,
    selected_on: str | None = None,
    skipped: Mapping[str, int] | None = None,
) -> None:
    """Write evaluation.json: `parts` maps "test" and "valid" to {"model", "popularity", "markov"} to metrics."""
    record = {
        "step": step,
        "epoch": epoch,
        "selected_on": selected_on,
        "parts": parts,
        "num_users": num_users,
        "skipped": dict(skipped or {}),
        "repeated": REPEATED,
        "protocol": protocol,
    }
    replace_text(path, json.dumps(record, ensure_ascii=False, indent=2) + "\n")


@dataclass(frozen=True)
class _StoppableItems:
    """`ItemVectors` that can be stopped before every chunk: a pass over a large catalogue takes long."""

    items: ItemVectors
    step: Step

    @property
    def num_items(self) -> int:
        return self.items.num_items

    def item_rows(self, start: int, stop: int) -> Tensor:
        self.step(0)
        return self.items.item_rows(start, stop)


def _seen(held_out: HeldOut, chosen: slice, device: torch.device) -> Jagged:
    items, lengths = held_out.seen(chosen.start, chosen.stop)
    return Jagged.from_lengths(torch.from_numpy(items), torch.from_numpy(lengths)).to(device)
