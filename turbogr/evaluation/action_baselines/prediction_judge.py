"""How predictions of a task are judged where settings are chosen on the validation events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation import action_metrics

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Judge:
    """Judges predictions of one task on the validation events: `labels` [v] of `users` [v]; more is better.

    Of a binary task it is the mean of AUC and GAUC (the negative log loss where neither is defined), of numbers the
    negative mean squared error.
    """

    labels: Floats
    users: Int64Array
    binary: bool

    def value(self, predictions: Floats) -> float:
        if not self.binary:
            return -float(np.mean((predictions - self.labels) ** 2))
        overall = action_metrics.auc(self.labels, predictions).value
        by_user = action_metrics.gauc(self.labels, predictions, self.users).gauc.value
        values = [value for value in (overall, by_user) if np.isfinite(value)]
        return float(np.mean(values)) if values else -action_metrics.log_loss(self.labels, predictions).value
