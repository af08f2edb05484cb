"""Coverage: how much of the catalogue a recommender shows at all.

A recommender with a good hit rate may still show everybody the same few items. Coverage is the number of items that
are in at least one list of the k best, over the lists of the evaluated users, made as the evaluation makes them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.item_ranking import top_k
from turbogr.evaluation.job_pool import Step, run_jobs
from turbogr.evaluation.metric_info import Coverage
from turbogr.evaluation.scorer import Scorer, batches_of
from turbogr.evaluation.user_histories import StoreHistories
from turbogr.evaluation.user_sample import UserSample
from turbogr.jagged import Jagged

DEFAULT_K = 10
MAX_SCORES = 1 << 31  # scores to compute at most; seconds on a laptop


def coverage(
    scorer: Scorer,
    store: Store,
    split: Split,
    part: str = "test",
    *,
    k: int = DEFAULT_K,
    filter_seen: bool = True,
    sample: UserSample | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Coverage:
    """Measure the coverage of the lists of a part's users, or of a `sample` of them, with `evaluate`'s candidates.

    Where users × items exceed MAX_SCORES, some users at even steps of the store are taken; `num_users` counts them.

    Raises:
        Interrupted: `should_stop` returned True.
        UserError: the split holds nothing out for this part.
    """
    held_out = HeldOut.of(store, split, part, sample=sample)
    chosen = _even_steps(len(held_out), max(1, MAX_SCORES // store.num_items))

    def shown_by(job: slice, step: Step) -> Int64Array:
        users = chosen[job]
        scores = scorer.score(StoreHistories(store, held_out.users[users], held_out.events[users]), step)
        seen = [store.items[held_out.starts[user] : held_out.events[user]].astype(np.int64) for user in users]
        excluded = Jagged.from_rows([torch.from_numpy(items) for items in seen]).to(scores.device)
        _, rows = top_k(scores, k, excluded if filter_seen else None)
        distinct: Int64Array = np.unique(rows.cpu().numpy())
        return distinct

    shown = np.zeros(store.num_items, bool)
    jobs = batches_of(len(chosen), scorer.batch_size)
    for rows in run_jobs(shown_by, jobs, num_workers=scorer.num_workers, should_stop=should_stop):
        shown[rows[rows >= 0]] = True
    return Coverage(k, int(shown.sum()), store.num_items, len(chosen))


def _even_steps(num: int, most: int) -> Int64Array:
    """Return at most `most` of the numbers 0 to num - 1, evenly spread."""
    return np.arange(num) if num <= most else ((np.arange(most) + 0.5) / most * num).astype(np.int64)
