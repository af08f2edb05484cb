"""Successive halving without waiting: whenever a job is free, one of the best third at a rung goes on, or a new trial
starts (asynchronous successive halving: Li et al., "A system for massively parallel hyperparameter tuning", 2018).

So the search needs no plan of how many trials fit into the time, and can stop at any moment.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from turbogr.tuning.search_space import Settings

KEPT = 3
"""Of so many trials that reached a rung, one goes on."""

NUM_RUNGS = 3


@dataclass
class Trial:
    """One choice of settings and how far it has come; `values` has the best validation value at every rung reached.

    `newest` is the best value so far, which may be later than the last rung.

    `failed` is why it cannot be trained. `seconds` are those of its processes, `epochs` of `of_epochs` are trained.
    """

    name: str
    settings: Settings
    values: list[float] = field(default_factory=list)
    newest: float | None = None
    standard_error: float | None = None
    seconds: float = 0.0
    epochs: float = 0.0
    of_epochs: int | None = None
    failed: str | None = None

    @property
    def value(self) -> float:
        """The best validation value so far; NaN before the first evaluation."""
        return math.nan if self.newest is None else self.newest


def rung_epochs(epochs: int | None, every: int) -> list[int | None]:
    """Return the epochs at which a trial pauses: after about a ninth, a third and all of its evaluations.

    Without a number of epochs, or with a single evaluation, there is one rung: the end (None).
    """
    if epochs is None:
        return [None]
    evaluations = math.ceil(epochs / every)
    shares = [KEPT ** (rung - NUM_RUNGS + 1) for rung in range(NUM_RUNGS)]
    counts = dict.fromkeys(max(1, round(evaluations * share)) for share in shares)
    return [min(epochs, count * every) for count in counts]


def next_promotion(
    trials: Sequence[Trial], running: Collection[str], num_rungs: int, *, higher_is_better: bool, last: bool = False
) -> Trial | None:
    """Return the trial that should go on to its next rung, None if none should.

    With `last`, when no new trial can be started, the best of any rung goes on however few there are.
    """
    sign = 1 if higher_is_better else -1
    for rung in reversed(range(1, num_rungs)):
        reached = [trial for trial in trials if len(trial.values) >= rung and trial.failed is None]
        best = sorted(reached, key=lambda trial: -sign * trial.values[rung - 1])
        most = max(1, len(best) // KEPT) if last else len(best) // KEPT
        waiting = [trial for trial in best[:most] if len(trial.values) == rung and trial.name not in running]
        if waiting:
            return waiting[0]
    return None


def best_trial(trials: Sequence[Trial], *, higher_is_better: bool) -> Trial | None:
    """Return the trial with the best value so far; of equal ones the first."""
    sign = 1 if higher_is_better else -1
    reached = [trial for trial in trials if trial.newest is not None and trial.failed is None]
    return max(reached, key=lambda trial: sign * trial.value, default=None)
