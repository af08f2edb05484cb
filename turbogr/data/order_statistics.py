"""How well one number orders another: the area under the ROC curve, exactly and with ties."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def auc(positive: NDArray[np.bool_], scores: NDArray[Any]) -> float:
    """Return the share of pairs of a positive and a negative of which the positive has the higher score; ties half.

    NaN where one of the classes is missing. `positive` [n], `scores` [n] without NaN.
    """
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    order = np.argsort(scores, kind="stable")
    values, positive = scores[order], positive[order]
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True))  # the last of every run of equal scores
    positives = np.diff(np.cumsum(positive)[ends], prepend=0)
    negatives = np.diff(ends + 1, prepend=0) - positives
    below = np.cumsum(negatives) - negatives
    # Twice the number of ordered pairs is an integer, so the value does not depend on the order of the sum.
    doubled = int((positives * (2 * below + negatives)).sum())
    return doubled / (2 * num_positive * num_negative)
