"""How long a training step takes, and what the main thread waits for meanwhile."""

from __future__ import annotations

import time

from turbogr.parallel.world import communication_seconds
from turbogr.progress import Window
from turbogr.training.pipeline.executor import Executor


class StepClock:
    """Times a step from its start, and what the main thread waited for since the step before."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._before = executor.idle + executor.exposed
        self._sparse, self._dense = _communication_seconds()
        self._started = time.perf_counter()
        self.seconds = self.own_seconds = 0.0

    def stop(self, window: Window) -> None:
        """Set `seconds`, those of this rank's `own_seconds` work, and add what was waited for to a window.

        The next step begins with none.
        """
        executor = self._executor
        sparse, dense = _communication_seconds()
        self.seconds = time.perf_counter() - self._started + self._before
        for_rows, for_ranks = executor.exposed + sparse - self._sparse, dense - self._dense
        self.own_seconds = self.seconds - for_rows - for_ranks - executor.idle
        window.exposed_sparse += for_rows
        window.exposed_dense += for_ranks
        window.idle += executor.idle
        executor.idle = executor.exposed = 0.0


def _communication_seconds() -> tuple[float, float]:
    return communication_seconds("sparse"), communication_seconds("dense") + communication_seconds("agreement")


def time_shares(window: Window, seconds: float) -> dict[str, float]:
    """What the main thread did with its time, as shares that add up to 1, and what early reads saw."""
    waited = window.exposed_sparse + window.exposed_dense + window.idle
    shares = {
        "compute_share": 1.0 - waited / seconds,
        "exposed_sparse_share": window.exposed_sparse / seconds,
        "exposed_dense_share": window.exposed_dense / seconds,
        "idle_share": window.idle / seconds,
        "staleness": window.staleness,
    }
    return shares | ({"collision_rate": window.rows_shared / window.rows_read} if window.rows_read else {})
