"""Evaluation of a model on the held-out items of a split, and the file with the result.

Every held-out item is ranked among the whole catalogue: no candidates are sampled and no user is dropped. The metrics
do not depend on the batch size, the number of threads or the number of ranks, to the last digit. Users are taken in
store order and cut into fixed tiles, for encoding and for scoring; one thread computes a tile. The batch size only says
how many tiles share a pass over the catalogue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.baselines import markov_positions, popularity_positions
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.item_ranking import positions_both_ways
from turbogr.evaluation.job_pool import Interrupted, Step, run_jobs
from turbogr.evaluation.metrics import DEFAULT_KS, MISSED, Metric, ranking_metrics, standard_errors
from turbogr.evaluation.scorer import Scorer, batches_of
from turbogr.evaluation.user_histories import StoreHistories
from turbogr.evaluation.user_positions import Measured
from turbogr.evaluation.user_sample import UserSample
from turbogr.files import replace_text
from turbogr.jagged import Jagged
from turbogr.parallel.world import World

__all__ = [
    "Evaluation",
    "Interrupted",
    "baseline_metrics",
    "evaluate",
    "measure_baselines",
    "write_evaluation",
]

Metrics = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """The result on one part: `metrics`, and the `positions` [n] of the held-out items of `users` [n] (store rows).

    A held-out item that the filter removed from the candidates has the position MISSED. `skipped` counts the other
    users of the store by reason; `protocol` says in one sentence what was measured. `metrics_exclude_seen` and
    `metrics_include_seen` are those without and with the users' earlier items among the candidates; `metrics` is one of
    the two.
    """

    part: str
    metrics: Metrics
    users: Int64Array
    positions: Int64Array
    skipped: dict[str, int]
    protocol: str
    metrics_exclude_seen: Metrics
    metrics_include_seen: Metrics

    @property
    def num_users(self) -> int:
        return len(self.users)

    @property
    def standard_errors(self) -> Metrics:
        return standard_errors(self.positions, self.metrics)


def evaluate(
    scorer: Scorer,
    store: Store,
    split: Split,
    part: str = "test",
    *,
    ks: Sequence[int] = DEFAULT_KS,
    filter_seen: bool = True,
    filter_last: int | None = None,
    sample: UserSample | None = None,
    extra: Mapping[str, Metric] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    world: World | None = None,
) -> Evaluation:
    """Rank the held-out item of every user of `part` ("valid" or "test") against the whole catalogue.

    The scores are those of the history before the held-out event. With `filter_seen` the items of the user's earlier
    events (of the newest `filter_last` events, if given) are not candidates, and a held-out item that is among them
    counts as missed; the other way is measured in the same pass. `batch_size` users (rounded up to whole tiles) share
    one pass over the catalogue; unset, it follows from the size of the catalogue. `progress` is called with the number
    of users scored since its last call. In a `world` of several ranks all of them call this function, each ranks the
    items of some users, and each returns the whole result. `extra` are further metrics by name. With a `sample`
    only its users are measured.

    Raises:
        Interrupted: `should_stop` returned True, on any rank; it is asked several times a second.
        UserError: the split holds nothing out for this part, or a score is not a finite number.
    """
    held_out = HeldOut.of(store, split, part, filter_last=filter_last, sample=sample)
    targets = torch.from_numpy(held_out.targets)

    def rank_targets(chosen: slice, step: Step) -> Int64Array:
        histories = StoreHistories(store, held_out.users[chosen], held_out.events[chosen])
        scores = scorer.score(histories, step)
        seen = _seen(held_out, chosen, scores.device)
        found = positions_both_ways(scores, targets[chosen].to(scores.device), seen)
        positions: Int64Array = torch.stack(found).cpu().numpy()
        return positions

    num_workers, world = scorer.num_workers, world or World()
    if batch_size is None:
        batch_size = min(scorer.batch_size, -(-len(held_out) // (4 * num_workers * world.size)))
    jobs = batches_of(len(held_out), batch_size)

    def rank_my_jobs() -> list[Int64Array] | None:
        mine = jobs[world.rank :: world.size]
        try:
            return list(
                run_jobs(rank_targets, mine, num_workers=num_workers, progress=progress, should_stop=should_stop)
            )
        except Interrupted:
            return None

    parts = world.gather_objects(world.run_on_all(rank_my_jobs))
    both = np.empty((2, len(held_out)), np.int64)
    for rank, found in enumerate(parts):
        if found is None:
            raise Interrupted("interrupted before all users were done")
        for job, some in zip(jobs[rank :: world.size], found, strict=True):
            both[:, job] = some
    exclude_seen, include_seen = (ranking_metrics(positions, ks, extra) for positions in both)
    positions = both[0 if filter_seen else 1]
    return Evaluation(
        part=part,
        metrics=exclude_seen if filter_seen else include_seen,
        users=held_out.users,
        positions=positions,
        skipped=held_out.skipped,
        protocol=_protocol(store, split, part, filter_seen, filter_last, int((positions == MISSED).sum()), sample),
        metrics_exclude_seen=exclude_seen,
        metrics_include_seen=include_seen,
    )


def _protocol(
    store: Store,
    split: Split,
    part: str,
    filter_seen: bool,
    filter_last: int | None,
    num_repeated: int,
    sample: UserSample | None,
) -> str:
    """Return one sentence that says what the metrics of `part` measure."""
    item = "validation item" if part == "valid" else "test item"
    newest = "" if filter_last is None else f"last {filter_last} "
    seen = f"without the user's {newest}earlier items" if filter_seen else "the user's earlier items included"
    if num_repeated:
        seen += f"; {num_repeated:,} {item}{'s were' if num_repeated > 1 else ' was'} among these and counted as missed"
    ties = "; events at the same time are in random order" if (store.manifest.ties or ("",))[0] == "random" else ""
    sampled = "" if sample is None else sample.describe(int((split.targets(part) >= 0).sum()))
    users = f"; {sampled}" if sampled else ""
    return f"{split.describe()}{ties}; the {item} is ranked against all {store.num_items:,} items, {seen}{users}"


def baseline_metrics(store: Store, split: Split, part: str = "test", **options: Any) -> dict[str, Metrics]:
    """Return the metrics of `measure_baselines`, which has the same arguments."""
    return {name: system.metrics for name, system in measure_baselines(store, split, part, **options).items()}


def measure_baselines(
    store: Store,
    split: Split,
    part: str = "test",
    *,
    ks: Sequence[int] = DEFAULT_KS,
    filter_seen: bool = True,
    filter_last: int | None = None,
    sample: UserSample | None = None,
    extra: Mapping[str, Metric] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Measured]:
    """Measure "popularity" and "markov" on the same users, candidates and filter as `evaluate`."""
    held_out = HeldOut.of(store, split, part, filter_last=filter_last, sample=sample)
    counts = store.item_counts(split.train_end)

    def stop() -> None:
        if should_stop is not None and should_stop():
            raise Interrupted("interrupted before the baselines were measured")

    found = {
        "popularity": popularity_positions(held_out, counts, stop=stop),
        "markov": markov_positions(held_out, split, counts, stop=stop),
    }
    return {name: _measured(both, filter_seen, ks, extra) for name, both in found.items()}


def _measured(
    both: tuple[Int64Array, Int64Array], filter_seen: bool, ks: Sequence[int], extra: Mapping[str, Metric] | None
) -> Measured:
    """Measure positions [n] without and with seen items; `filter_seen` chooses those of the protocol."""
    exclude_seen, include_seen = (ranking_metrics(positions, ks, extra) for positions in both)
    metrics, positions = (exclude_seen, both[0]) if filter_seen else (include_seen, both[1])
    return Measured(metrics, standard_errors(positions, metrics), positions, exclude_seen, include_seen)


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
    rule: Mapping[str, Any] | None = None,
    standard_errors: Mapping[str, Mapping[str, Metrics]] | None = None,
    coverage: Mapping[str, Any] | None = None,
    both_ways: Mapping[str, Mapping[str, Mapping[str, Metrics]]] | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write evaluation.json: `parts` maps "test" and "valid" to metrics of "model" and of each baseline.

    `standard_errors` has the form of `parts`; `coverage` has the model's `Coverage` by part. `rule` is what
    `Task.rule` returns, and "filter_last" if only the newest items were filtered. `both_ways` maps
    "parts_exclude_seen" and "parts_include_seen" to what `parts` is without and with seen items among the candidates.
    `details` has, in the form of `parts`, what a task that predicts actions shows of them.
    """
    record = {
        "step": step,
        "epoch": epoch,
        "selected_on": selected_on,
        "parts": parts,
        "standard_errors": dict(standard_errors or {}),
        "coverage": dict(coverage or {}),
        **(both_ways or {}),
        **({"details": details} if details else {}),
        "num_users": num_users,
        "skipped": dict(skipped or {}),
        "rule": dict(rule or {}),
        "protocol": protocol,
    }
    replace_text(path, json.dumps(record, ensure_ascii=False, indent=2) + "\n")


def _seen(held_out: HeldOut, chosen: slice, device: torch.device) -> Jagged:
    items, lengths = held_out.seen(chosen.start, chosen.stop)
    return Jagged.from_lengths(torch.from_numpy(items), torch.from_numpy(lengths)).to(device)
