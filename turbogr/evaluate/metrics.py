"""Ranking metrics as pure functions of ranks.

Exactly one item is relevant for each user, so its rank says everything: hr@k is the share of users whose rank is at
most k (with one relevant item this is also recall@k), ndcg@k the mean of 1 / log2(rank + 1) over those users and 0
over the others, mrr the mean of 1 / rank over the whole catalogue, not cut at any k. An item that could not be
recommended at all has the rank MISSED, which is a miss at every k and adds nothing to any metric.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DEFAULT_KS = (10, 50, 200)
MISSED = 2**63 - 1
REPEATED = "missed"
"""What a held-out item counts as that the filter of seen items removes; kept with results, since it was otherwise once
and figures of two rules cannot be compared."""


def ranking_metrics(ranks: NDArray[np.int64], ks: Sequence[int] = DEFAULT_KS) -> dict[str, float]:
    """Return {"hr@k", "ndcg@k" for every k in `ks`, "mrr"} of the 1-based `ranks` [n], in fp64.

    The result does not change, to the last digit, with the order of the ranks.

    Raises:
        ValueError: no ranks, a rank below 1, or a k below 1.
    """
    if len(ranks) == 0:
        raise ValueError("no ranks: metrics of zero users are undefined")
    if min(ks, default=1) < 1:
        raise ValueError(f"every k must be at least 1, got {list(ks)}")
    # Summing over distinct ranks in ascending order makes the rounding independent of the order of the users.
    distinct, counts = np.unique(ranks, return_counts=True)
    if distinct[0] < 1:
        raise ValueError(f"ranks start at 1, got {distinct[0]}")
    num_users = len(ranks)
    ranked = distinct < MISSED
    distinct, counts = distinct[ranked], counts[ranked]
    metrics: dict[str, float] = {}
    for k in ks:
        hits = slice(0, int(np.searchsorted(distinct, k, side="right")))
        metrics[f"hr@{k}"] = int(counts[hits].sum()) / num_users
        metrics[f"ndcg@{k}"] = float((counts[hits] / np.log2(distinct[hits] + 1.0)).sum()) / num_users
    metrics["mrr"] = float((counts / distinct).sum()) / num_users
    return metrics
