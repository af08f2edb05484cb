"""Predictions of a ranking model with whole tables: of stored events, and of candidates of requests.

Batches are cut in a fixed order and one thread computes a batch, so predictions do not depend on the number of threads
or ranks, to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from turbogr.data.batching import event_batch
from turbogr.data.ranges import cut_by_budget, offsets_of
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.job_pool import Interrupted, Step, run_jobs
from turbogr.jagged import Jagged
from turbogr.models.ranking_layout import earlier_events, ranking_layout
from turbogr.parallel.world import World
from turbogr.tables.working_set import on_device
from turbogr.tasks.ranking_requests import EventBlocks, QueryBatch, RankingRequests, request_batch

if TYPE_CHECKING:
    from turbogr.tasks.ranking import RankingTask

_EVENTS_AT_ONCE = 1 << 13

Predictions = dict[str, NDArray[np.float64]]


def predict_events(
    task: RankingTask,
    tables: Mapping[str, Tensor],
    store: Store,
    starts: Int64Array,
    ends: Int64Array,
    *,
    progress: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    world: World | None = None,
) -> Predictions:
    """Predict events starts[u]:ends[u] of every user, in the order of the store: [n] by task.

    An event sees the user's events at earlier times. In a `world` of several ranks each computes some of them, and each
    returns all.

    Raises:
        Interrupted: `should_stop` returned True, on any rank.
    """
    blocks = EventBlocks.of(store, starts, ends, task.model.max_len)
    jobs = blocks.batches(_EVENTS_AT_ONCE)

    def predict(chosen: slice, step: Step) -> NDArray[np.float64]:
        found = _predict(task, tables, store, _block_batch(task, store, blocks, chosen))
        step(len(np.unique(blocks.users[chosen])))
        return found

    world = world or World()

    def predict_mine() -> list[NDArray[np.float64]] | None:
        workers = None if task.device.type == "cpu" else 1
        try:
            mine = jobs[world.rank :: world.size]
            return list(run_jobs(predict, mine, num_workers=workers, progress=progress, should_stop=should_stop))
        except Interrupted:
            return None

    parts = world.gather_objects(world.run_on_all(predict_mine))
    if any(part is None for part in parts):
        raise Interrupted("interrupted before all events were predicted")
    found = [part for number in range(len(jobs)) for part in [(parts[number % world.size] or [])[number // world.size]]]
    return task.by_name(np.concatenate(found, axis=0) if found else np.empty((0, len(task.ranking.tasks))))


def predict_requests(
    task: RankingTask, tables: Mapping[str, Tensor], store: Store, requests: RankingRequests
) -> Predictions:
    """Predict all candidates of all requests, [n] by task, in their order."""
    pieces = _pieces(requests, task.model.max_len)
    cost = np.diff(pieces.items.offsets.numpy()) + task.model.max_len
    bounds = cut_by_budget(offsets_of(cost), 2 * _EVENTS_AT_ONCE).tolist()
    jobs = [slice(first, last) for first, last in pairwise(bounds)]

    def predict(chosen: slice, step: Step) -> NDArray[np.float64]:
        return _predict(
            task,
            tables,
            store,
            request_batch(store, pieces, chosen, task.columns, task.model.max_len, task.ranking.delay),
        )

    workers = None if task.device.type == "cpu" else 1
    found = list(run_jobs(predict, jobs, num_workers=workers))
    return task.by_name(np.concatenate(found, axis=0) if found else np.empty((0, len(task.ranking.tasks))))


def _pieces(requests: RankingRequests, most: int) -> RankingRequests:
    """Cut requests so that none has more than `most` candidates; their order stays."""
    lengths = np.diff(requests.items.offsets.numpy())
    counts = -(-lengths // most)
    row = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = np.minimum(lengths[row] - number * most, most)
    return RankingRequests(
        requests.users[row],
        requests.ends[row],
        requests.times[row],
        Jagged.from_lengths(requests.items.values, torch.from_numpy(cut.astype(np.int64))),
        requests.events,
        requests.event_features,
    )


def _block_batch(task: RankingTask, store: Store, blocks: EventBlocks, chosen: slice) -> QueryBatch:
    starts, lengths = blocks.starts[chosen], blocks.lasts[chosen] - blocks.starts[chosen]
    batch = event_batch(store, blocks.users[chosen], starts, lengths, task.columns)
    own = torch.from_numpy(np.repeat(blocks.firsts[chosen] - starts, lengths))
    is_query = batch.items.positions() >= own
    is_history = torch.ones_like(is_query)
    is_history[batch.items.offsets[1:] - 1] = False
    return QueryBatch(batch, is_history, is_query, earlier_events(batch.items, batch.times, task.ranking.delay))


def _predict(task: RankingTask, tables: Mapping[str, Tensor], store: Store, queries: QueryBatch) -> NDArray[np.float64]:
    """Return what a batch's queries get, [N, tasks] in the tasks' own units."""
    batch, device = task.with_counts(queries.batch, store), task.device
    layout = ranking_layout(batch.items, queries.is_history, queries.is_query, queries.sees)
    vectors = {}
    for table, ids in task.ids(batch).items():
        found = []
        for wanted in ids.inputs:
            rows, index = on_device(tables[table], wanted, device)
            found.append(F.embedding(index, rows))
        vectors[table] = found
    outputs = task.outputs(vectors, batch.to(device), layout.to(device), None)
    return task.in_own_units(outputs)
