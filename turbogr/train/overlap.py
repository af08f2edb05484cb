"""How the stages of different batches overlap: the serial loop, and the pipeline with its three update modes.

A batch passes six stages: load, exchange (find the distinct ids and tell their owners how many), wait (until the owners
know them), embed (rows on their way to the ranks), dense (forward and backward) and update (gradients to the owners of
the rows, all weights changed). Every executor below does them for every batch; they differ in what may run early.

    Serial          nothing: the definition of `sync`
    Pipelined       load, exchange and wait of later batches; rows are read after every earlier update (`sync`)
    SemiAsync       rows of batch t are read when the updates of the batches before t - staleness are done, no more and
                    no fewer, and the update of rows runs beside the next batches
    ExactOverlap    as SemiAsync one batch ahead, but rows that two consecutive batches share are updated at once and
                    read after that; the others' updates and reads may wait and go ahead without changing anything

Which rows are read between which updates is fixed, so results depend neither on the speed of anything nor on threads,
and an executor whose workers have no threads gives the same. A table is read early and updated by one worker only; the
main thread touches, beside it, rows that the worker does not. Every thread talks over a channel of its own, in an order
that is the same on all ranks: batches are admitted one by one as steps end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbogr.config import PipelineConfig
from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.layers.item_table import Request, RowGradients, Table, WorkingSet, gradient_of, marked
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.train.lanes import upload
from turbogr.train.step import Measured, Stepper
from turbogr.train.timeline import Timeline
from turbogr.train.workers import Job, Threaded, Worker

MakeWorker = Callable[[str, torch.device, Timeline], Worker]


@dataclass
class Shared:
    """The rows of a request that another batch has too, and the rest; `mine` [R] flags the former."""

    mine: Tensor
    rows: Request
    rest: Request


@dataclass
class Flight:
    """A batch on its way: `position` is that of the loader behind it.

    `question` is its ids on their way, done by the main thread's clock at `ready`. `before` are the rows that the batch
    before has too, `after` those that the next one has. `staleness` is how many updates its rows lack. Of `rows_read`
    rows of this process's table that ranks ask for, `rows_shared` were also asked for by the batch before.
    """

    step: int
    batch: Batch
    position: dict[str, int]
    question: Any = None
    request: Request | None = None
    before: Shared | None = None
    after: Shared | None = None
    staleness: int = 0
    rows_read: int = 0
    rows_shared: int = 0
    ready: float = 0.0

    @property
    def asked(self) -> Request:
        assert self.request is not None, "the ids are not exchanged yet"
        return self.request


@dataclass
class Reduced:
    """What of a step's gradients is global already: the dense ones, and of the table's those of `rows`, which are all
    of them if `complete`."""

    rows: RowGradients | None
    complete: bool


class Serial:
    """One batch at a time, in the calling thread."""

    def __init__(self, stepper: Stepper, timeline: Timeline) -> None:
        self.stepper, self.timeline = stepper, timeline
        self.idle = self.exposed = 0.0
        """Seconds that the main thread has waited for batches, and for rows on their way to it or to their owners."""

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        """Yield the batches of the rest of an epoch, at most `limit`; the next step is `first`."""
        with closing(loader.batches(lambda batch, ahead: self.stepper.draw_ahead(batch, first + ahead))) as batches:
            for step in range(first, first + _num_left(loader, limit)):
                started = time.perf_counter()
                batch = next(batches).to(self.stepper.device)
                self.idle += time.perf_counter() - started
                yield Flight(step, batch, loader.state_dict())
        loader.load_state_dict(loader.state_dict())

    def fetch(self, flight: Flight) -> WorkingSet:
        """Return the rows of a batch."""
        with self.timeline.span("main", "embed", flight.step):
            return self.stepper.fetch(flight.batch, flight.step)

    def reduce(self, flight: Flight, working_set: WorkingSet) -> Reduced:
        """Sum gradients over the ranks."""
        with self.timeline.span("main", "reduce", flight.step):
            return Reduced(self.stepper.reduce(working_set), True)

    def measure(self, flight: Flight, working_set: WorkingSet, reduced: Reduced, loss: Tensor, wish: int) -> Measured:
        """Agree with all ranks on the loss and the norm of the gradients."""
        grad = reduced.rows.grad if reduced.rows is not None and reduced.complete else gradient_of(working_set.rows)
        with self.timeline.span("main", "agree", flight.step):
            return self.stepper.agree(
                loss,
                grad,
                wish,
                summed=reduced.complete,
                rows_read=flight.rows_read,
                rows_shared=flight.rows_shared,
            )

    def update(
        self, flight: Flight, working_set: WorkingSet, reduced: Reduced, grad_norm: float, factor: float
    ) -> None:
        """Update everything, now or, as far as the mode allows, in time for whoever reads it."""
        assert reduced.rows is not None
        with self.timeline.span("main", "update", flight.step):
            self.stepper.update(reduced.rows, grad_norm, factor)
        self.updated = reduced.rows.slots

    updated: Tensor
    """Rows of this process's table that the last step updated, the same on all ranks that hold them; see `settle`."""

    def settle(self) -> None:
        """Wait until all updates of the steps so far are done."""

    def earlier(self) -> list[Tensor]:
        """Return the table's weights that batches yet to be computed read and that are no more, oldest first."""
        return []

    def continue_with(self, earlier: Sequence[Tensor]) -> None:
        """Let the first batches read these weights, as those of an interrupted run did."""

    def close(self) -> None:
        """End after the current step; what was begun is finished, on all ranks alike."""

    def abandon(self) -> None:
        """End at once, whatever other ranks do."""


class Pipelined(Serial):
    """Batches are loaded and their ids exchanged by workers, `depth` batches ahead at most."""

    ahead = 0
    """How many batches further the rows are read."""

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = Threaded) -> None:
        super().__init__(stepper, timeline)
        self.depth = depth
        self._channels: list[Mesh] = []
        self._make_worker = make_worker
        self._workers: dict[str, Worker] = {}
        names = ["load", "exchange", "wait", *(["embed"] if self.ahead else [])]
        self._tables = {name: self._table_for(name) for name in names}
        self._fronts: dict[int, Job] = {}
        self._first = self._end = 0

    def _table_for(self, stage: str) -> Table:
        """The item table over a channel of the stage."""
        table = self.stepper.table
        if stage == "load" or not isinstance(table, ShardedTable):
            return table
        self._channels.append(self.stepper.mesh.channel())
        return table.over(self._channels[-1])

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        self._workers = {name: self._make_worker(name, self.stepper.device, self.timeline) for name in self._tables}
        self._fronts = {}
        self._first, self._end = first, first + _num_left(loader, limit)
        position = loader.state_dict()
        # What an interrupted run shared with the batch before is told again.
        known = 1 if self.ahead and position["step"] and self._end > first else 0
        for step in range(first - known, min(first + self.depth, self._end)):
            self._admit(loader, position, step)
        for step in range(first, min(first + self.ahead + 1, self._end)):
            self._read_ahead(step)
        for step in range(first, self._end):
            flight = self._wait_for(self._fronts[step])
            loader.load_state_dict(flight.position)
            yield flight
            del self._fronts[step]
            if step + self.depth < self._end:
                self._admit(loader, position, step + self.depth)
            if step + 1 + self.ahead < self._end:
                self._read_ahead(step + 1 + self.ahead)

    def _admit(self, loader: Loader, position: dict[str, int], step: int) -> None:
        """Let a batch into the pipeline."""
        place = {"epoch": position["epoch"], "step": position["step"] + step - self._first}
        job = self._workers["load"].post(self._load, step, loader, place, step)
        job = self._workers["exchange"].post(self._exchange, step, job)
        self._fronts[step] = self._workers["wait"].post(self._wait, step, job)

    def _read_ahead(self, step: int) -> None:
        """Post the reading of the rows of a batch, where this mode does that."""

    def _load(self, loader: Loader, place: dict[str, int], step: int) -> Flight:
        batch = upload(loader.batch(**place), self.stepper.device)
        return Flight(step, batch, loader.position_after(**place))

    def _exchange(self, flight: Flight) -> Flight:
        flight.question = self._tables["exchange"].ask(self.stepper.ids(flight.batch, flight.step))
        flight.ready = time.perf_counter()
        return flight

    def _wait(self, flight: Flight) -> Flight:
        flight.request = self._tables["wait"].hear(flight.question)
        return flight

    def _wait_for(self, job: Job, flight: Flight | None = None) -> Any:
        """Return the result of a job for the main thread; the time counts as communication once a batch's ids are out.

        Without other ranks nothing is communicated, and all waiting is idle time.
        """
        started = time.perf_counter()
        result = job.result()
        ended = time.perf_counter()
        ready = (flight or result).ready if self.stepper.mesh.world.size > 1 else ended
        idle = min(max(ready, started), ended) - started
        self.idle += idle
        self.exposed += ended - started - idle
        return result

    def fetch(self, flight: Flight) -> WorkingSet:
        table = self.stepper.table
        with self.timeline.span("main", "embed", flight.step):
            return table.working_set(flight.asked, table.receive(table.answer(flight.asked)))

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers = {}

    def abandon(self) -> None:
        for worker in self._workers.values():
            worker.abandon()
        for channel in self._channels:
            channel.abort()
        for worker in self._workers.values():
            worker.wait_a_little()
        self._workers = {}


class _Ahead(Pipelined):
    """A worker reads rows of later batches and, between such reads, updates rows of the batches before."""

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = Threaded) -> None:
        super().__init__(stepper, timeline, depth, make_worker)
        self._reads: dict[int, Job] = {}
        self._updates: deque[Job] = deque()

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        self._reads, self._updates = {}, deque()
        yield from super().flights(loader, first, limit)

    def _read_ahead(self, step: int) -> None:
        self._reads[step] = self._workers["embed"].post(self._read, step, self._fronts[step])

    def _read(self, flight: Flight) -> Tensor:
        """Look rows of a batch up and send them, in the worker; return those that came."""
        raise NotImplementedError

    def _update_later(self, work: Callable[..., Tensor], flight: Flight, *arguments: Any) -> None:
        """Post an update of rows, which returns the slots that it updates."""
        self._updates.append(self._workers["embed"].post(work, flight.step, flight, *arguments))

    def settle(self) -> None:
        while self._updates:
            self.updated = self._updates.popleft().result()

    def close(self) -> None:
        self.settle()
        super().close()


class SemiAsync(_Ahead):
    """Rows of a batch lack the updates of the `staleness` batches before it, of an epoch's first batches as many as
    there are: an epoch starts with all updates done."""

    def __init__(
        self,
        stepper: Stepper,
        timeline: Timeline,
        depth: int,
        staleness: int,
        make_worker: MakeWorker = Threaded,
    ) -> None:
        self.ahead = staleness
        super().__init__(stepper, timeline, depth, make_worker)
        self._undo: deque[RowGradients] = deque(maxlen=staleness)
        """What the last updates of this epoch have overwritten."""
        self._gone: list[Tensor] = []
        self._version = 0
        self._seen: Tensor | None = None

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        if loader.state_dict()["step"] == 0:
            self._undo.clear()
        self._seen = None
        self._version, self._gone = first, self.earlier()
        yield from super().flights(loader, first, limit)

    def _wait(self, flight: Flight) -> Flight:
        flight = super()._wait(flight)
        seen = marked(self.stepper.table.weight, [flight.asked.slots])
        if self._seen is not None:
            flight.rows_read, flight.rows_shared = int(seen.sum()), int((seen & self._seen).sum())
        self._seen = seen
        return flight

    def _read(self, flight: Flight) -> Tensor:
        oldest = self._first - len(self._gone)
        version = max(flight.step - self.ahead, oldest)
        assert version < self._first or version == self._version, (flight.step, version, self._version)
        flight.staleness = flight.step - version
        table = self._tables["embed"]
        weight = self._gone[version - oldest] if version < self._first else None
        if weight is None:
            self._gone = []
        return table.receive(table.answer(flight.asked, weight))

    def fetch(self, flight: Flight) -> WorkingSet:
        with self.timeline.span("main", "embed", flight.step):
            rows = self._wait_for(self._reads.pop(flight.step), flight)
        return self.stepper.table.working_set(flight.asked, rows)

    def reduce(self, flight: Flight, working_set: WorkingSet) -> Reduced:
        if self.stepper.config.optimizer.clip_norm is not None:
            return super().reduce(flight, working_set)
        with self.timeline.span("main", "reduce", flight.step):
            self.stepper.gradients.start()
            self.stepper.gradients.finish()
        return Reduced(None, False)

    def update(
        self, flight: Flight, working_set: WorkingSet, reduced: Reduced, grad_norm: float, factor: float
    ) -> None:
        with self.timeline.span("main", "update", flight.step):
            if reduced.rows is not None:
                self.stepper.clip(reduced.rows, grad_norm)
            self.stepper.update_dense(factor)
        number = self.stepper.rows.begin()
        self._update_later(self._update_rows, flight, gradient_of(working_set.rows), reduced.rows, factor, number)

    def _update_rows(
        self, flight: Flight, grad: Tensor, rows: RowGradients | None, factor: float, number: int
    ) -> Tensor:
        table = self._tables["embed"]
        if rows is None:
            rows = table.collect(table.send_back(flight.asked, grad))
        self._undo.append(RowGradients(rows.slots, table.weight[rows.slots]))
        self.stepper.update_rows(rows, factor, number)
        self._version += 1
        return rows.slots

    def earlier(self) -> list[Tensor]:
        found: list[Tensor] = []
        weight = self.stepper.table.weight
        for slots, values in reversed(self._undo):
            weight = weight.clone()
            weight[slots] = values
            found.insert(0, weight)
        return found

    def continue_with(self, earlier: Sequence[Tensor]) -> None:
        for old, new in zip(earlier, [*earlier[1:], self.stepper.table.weight], strict=False):
            slots = (old.view(torch.int32) != new.view(torch.int32)).any(1).nonzero().flatten()
            self._undo.append(RowGradients(slots, old[slots]))


class ExactOverlap(_Ahead):
    """What consecutive batches share is updated and read in the order of `sync`, the rest beside the computation.

    Rows that a batch shares with the one before are not read early to be sent again: they are read once, late.
    """

    ahead = 1

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = Threaded) -> None:
        super().__init__(stepper, timeline, depth, make_worker)
        self._previous: tuple[Flight, Tensor] | None = None

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        self._previous = None
        yield from super().flights(loader, first, limit)

    def _wait(self, flight: Flight) -> Flight:
        flight = super()._wait(flight)
        table = self._tables["wait"]
        touched = table.touched(flight.asked)
        if self._previous is not None:
            previous, touched_before = self._previous
            previous.after = _shared(table, previous.asked, touched)
            flight.before = _shared(table, flight.asked, touched_before)
            flight.rows_read, flight.rows_shared = int(touched.sum()), int((touched & touched_before).sum())
        self._previous = flight, touched
        return flight

    def _read(self, flight: Flight) -> Tensor:
        table = self._tables["embed"]
        if flight.before is None:
            return table.receive(table.answer(flight.asked))
        rows = table.weight.new_empty(flight.asked.ids.numel(), table.dim)
        rows[~flight.before.mine] = table.receive(table.answer(flight.before.rest))
        return rows

    def fetch(self, flight: Flight) -> WorkingSet:
        table, shared = self.stepper.table, flight.before
        with self.timeline.span("main", "embed", flight.step):
            late = None if shared is None else table.answer(shared.rows)
            rows: Tensor = self._wait_for(self._reads.pop(flight.step), flight)
            if shared is not None:
                rows[shared.mine] = table.receive(late)
            return table.working_set(flight.asked, rows)

    def reduce(self, flight: Flight, working_set: WorkingSet) -> Reduced:
        if self.stepper.config.optimizer.clip_norm is not None:
            return super().reduce(flight, working_set)
        if flight.step + 1 < self._end:
            self._wait_for(self._fronts[flight.step + 1])
        table = self.stepper.table
        with self.timeline.span("main", "reduce", flight.step):
            self.stepper.gradients.start()
            rows = None
            if flight.after is not None:
                grad = gradient_of(working_set.rows)[flight.after.mine]
                rows = table.collect(table.send_back(flight.after.rows, grad))
            self.stepper.gradients.finish()
        return Reduced(rows, False)

    def update(
        self, flight: Flight, working_set: WorkingSet, reduced: Reduced, grad_norm: float, factor: float
    ) -> None:
        if reduced.complete:
            super().update(flight, working_set, reduced, grad_norm, factor)
            return
        number = self.stepper.rows.begin()
        with self.timeline.span("main", "update", flight.step):
            self.stepper.update_dense(factor)
            if reduced.rows is not None:
                self.stepper.update_rows(reduced.rows, factor, number)
        done = [] if reduced.rows is None else [reduced.rows.slots]
        self._update_later(self._update_rest, flight, gradient_of(working_set.rows), done, factor, number)

    def _update_rest(self, flight: Flight, grad: Tensor, done: list[Tensor], factor: float, number: int) -> Tensor:
        table, shared = self._tables["embed"], flight.after
        request, grad = (flight.asked, grad) if shared is None else (shared.rest, grad[~shared.mine])
        rows = table.collect(table.send_back(request, grad))
        self.stepper.update_rows(rows, factor, number)
        return torch.cat([rows.slots, *done])


def make_executor(
    stepper: Stepper, config: PipelineConfig, timeline: Timeline, make_worker: MakeWorker = Threaded
) -> Serial:
    """Build what a config names; all ranks call it together."""
    depth = config.depth_on(stepper.mesh.world.size)
    if config.mode == "semi_async":
        return SemiAsync(stepper, timeline, depth, config.staleness, make_worker)
    if config.mode == "exact_overlap":
        return ExactOverlap(stepper, timeline, depth, make_worker)
    return Serial(stepper, timeline) if depth == 1 else Pipelined(stepper, timeline, depth, make_worker)


def _shared(table: Table, request: Request, others: Tensor) -> Shared:
    """Divide a request by whether `others`, a flag for every row of this process's table, has the rows too."""
    theirs = others[request.slots]
    mine = table.tell(request, theirs)
    return Shared(mine, table.part(request, mine, theirs), table.part(request, ~mine, ~theirs))


def _num_left(loader: Loader, limit: int | None) -> int:
    """Batches left of the epoch, at most `limit`."""
    position = loader.state_dict()
    left = loader.num_batches(position["epoch"]) - position["step"]
    return left if limit is None else min(left, limit)
