"""The protocol of an executor, and the batches it passes through the stages of a step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.tables.embedding_tables import PendingBatchIds
from turbogr.tables.table import RowGradients
from turbogr.tables.working_set import BatchRequest, WorkingSets
from turbogr.training.pipeline.row_parts import RowParts
from turbogr.training.step import Measured


@dataclass
class PendingBatch:
    """A batch between being loaded and being learnt.

    `position` is the loader's position after it. `ids`: the pending id exchange; `ids_sent`: when the ids were sent;
    `request`: the rows it needs, once every owner has the ids. `before` and `after` split these rows by group into
    those shared with the batch before and with the next one. `staleness` counts the updates that its rows miss. Of
    `rows_read` rows of this process's tables that any rank needs, `rows_shared` were needed by the batch before too.
    """

    step: int
    batch: Batch
    position: dict[str, int]
    ids: PendingBatchIds | None = None
    ids_sent: float = 0.0
    request: BatchRequest | None = None
    before: list[RowParts] | None = None
    after: list[RowParts] | None = None
    staleness: int = 0
    rows_read: int = 0
    rows_shared: int = 0

    @property
    def row_request(self) -> BatchRequest:
        assert self.request is not None, "the ids are not exchanged yet"
        return self.request


@dataclass
class ReducedGradients:
    """Gradients already summed over ranks: all dense ones, plus `rows` of every group (every used row if `complete`).

    `rows` is None where no row's gradient is summed yet.
    """

    rows: list[RowGradients] | None
    complete: bool


class Executor(Protocol):
    """Runs the stages of a step that depend on the mode.

    `idle` and `exposed` are the seconds that the main thread has waited for batches, and for rows or gradients on the
    network. `updated` has, by group, the rows of this process that the last step updated; it is valid after
    `finish_updates`, and the same on all ranks that hold a copy of them.
    """

    idle: float
    exposed: float
    updated: list[Tensor]

    def batches(self, loader: Loader, first: int, limit: int | None) -> Generator[PendingBatch, None, None]:
        """Yield the batches of the rest of an epoch, at most `limit`; the next step is `first`."""
        ...

    def fetch(self, pending: PendingBatch) -> WorkingSets:
        """Return the rows of a batch."""
        ...

    def reduce(self, pending: PendingBatch, sets: WorkingSets) -> ReducedGradients:
        """Sum gradients over the ranks, as far as the mode does that before the update."""
        ...

    def measure(
        self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients, loss: Tensor, stop_signal: int
    ) -> Measured:
        """Agree with all ranks on the loss and the norm of the gradients."""
        ...

    def update(
        self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients, grad_norm: float, factor: float
    ) -> None:
        """Update everything: now, or later where the mode allows it, but before the rows are read again."""
        ...

    def skip(self, pending: PendingBatch, sets: WorkingSets, reduced: ReducedGradients) -> None:
        """Leave the update out, in its place: later batches read the rows as if it had changed nothing."""
        ...

    def is_complete(self) -> bool:
        """Whether all updates of the steps so far are done in this process, without waiting."""
        ...

    def finish_updates(self) -> None:
        """Wait until all updates of the steps so far are done."""
        ...

    def past_weights(self) -> list[list[Tensor]]:
        """Return past versions of the tables that batches in flight still depend on, oldest first, each by group."""
        ...

    def restore_past_weights(self, versions: Sequence[Sequence[Tensor]]) -> None:
        """Let the first batches read these versions, as those of an interrupted run did, and no others."""
        ...

    def close(self) -> None:
        """End after the current step; what was started is finished, on all ranks alike."""
        ...

    def abandon(self) -> None:
        """End at once, whatever other ranks do."""
        ...


def num_batches_left(loader: Loader, limit: int | None) -> int:
    """Return how many batches are left of the epoch, at most `limit`."""
    position = loader.state_dict()
    left = loader.num_batches(position["epoch"]) - position["step"]
    return left if limit is None else min(left, limit)
