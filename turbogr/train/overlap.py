"""How the stages of different batches overlap: the serial loop, and the pipeline with its three update modes.

A batch passes six stages: load, exchange (find the distinct ids and tell their owners how many), wait (until the owners
know them), embed (rows on their way to the ranks), dense (forward and backward) and update (gradients to the owners of
the rows, all weights changed). Every executor below does them for every batch; they differ in what may run early.

    Serial          nothing: the definition of `sync`
    Pipelined       load, exchange and wait of later batches; rows are read after every earlier update (`sync`)
    SemiAsync       rows of batch t are read when the updates of the batches before t - staleness are done, no more and
                    no fewer, and the update of rows runs beside the next batches
    ExactOverlap    as SemiAsync one batch ahead, but rows that two consecutive batches share are read after they are
                    updated: at once where the later batch has them in its inputs, and beside its forward pass where
                    only its loss needs them; their gradients leave early where only the loss made them

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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.config import PipelineConfig
from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.layers.item_table import Marks, Request, RowGradients, Table, WorkingSet, gradient_of, marked
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.train.lanes import upload
from turbogr.train.step import Measured, Stepper
from turbogr.train.timeline import Timeline
from turbogr.train.workers import Job, Threaded, Worker, stage

MakeWorker = Callable[[str, torch.device, Timeline], Worker]
_UpdateRows = Callable[[RowGradients], None]

_REST, _SOON, _NOW, _EARLY = range(4)
"""What consecutive batches do with a row of the table, see `Parts`; `_SOON` and `_NOW` are the ranks of `Touched`."""


class StalenessError(RuntimeError):
    """A look-up would see other updates than the schedule says; raised before it is made."""


class Part(NamedTuple):
    """Some rows of a request: their places [n] in its `ids`, and a request for them alone."""

    places: Tensor
    request: Request


class Parts(NamedTuple):
    """The rows of a request by what two consecutive batches do with them: shared, and an input of the later one;
    shared, and needed by its loss alone, with an input or the loss alone of the earlier one; not shared."""

    now: Part
    soon: Part
    early: Part
    rest: Part


@dataclass
class Flight:
    """A batch on its way: `position` is that of the loader behind it.

    `question` is its ids on their way, done by the main thread's clock at `ready`. `before` divides its rows by what
    the batch before has of them, `after` by what the next one has. `staleness` is how many updates its rows lack. Of
    `rows_read` rows of this process's table that any rank asks for, in any group, `rows_shared` were also asked for by
    the batch before.
    """

    step: int
    batch: Batch
    position: dict[str, int]
    question: Any = None
    request: Request | None = None
    before: Parts | None = None
    after: Parts | None = None
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
                with stage("load", step):
                    batch = self.stepper.place(next(batches))
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

    def _table_for(self, name: str) -> Table:
        """The item table over a channel of the stage."""
        table = self.stepper.table
        if name == "load" or not isinstance(table, ShardedTable):
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
        self._seen = Marks(stepper.table.weight)
        self._has_seen = False

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        if loader.state_dict()["step"] == 0:
            self._undo.clear()
        self._has_seen = False
        self._version, self._gone = first, self.earlier()
        yield from super().flights(loader, first, limit)

    def _wait(self, flight: Flight) -> Flight:
        flight = super()._wait(flight)
        # Of all ranks' parts of the batch, as in ExactOverlap: rates of the two modes must be the same thing.
        slots, ranks = self._tables["wait"].touched(flight.asked)
        if self._has_seen:
            flight.rows_read, flight.rows_shared = slots.numel(), int(self._seen.of(slots).sum())
        self._seen.set(slots, ranks)
        self._has_seen = True
        return flight

    def _read(self, flight: Flight) -> Tensor:
        oldest = self._first - len(self._gone)
        version = max(flight.step - self.ahead, oldest)
        flight.staleness = self._checked_staleness(flight.step, version)
        table = self._tables["embed"]
        weight = self._gone[version - oldest] if version < self._first else None
        if weight is None:
            self._gone = []
        return table.receive(table.answer(flight.asked, weight))

    def _checked_staleness(self, step: int, version: int) -> int:
        """How many updates rows of this version lack, checked also where Python leaves assertions out.

        Raises:
            StalenessError: the table is at another version, or the rows would lack more than the config allows.
        """
        kept = version < self._first  # read from a copy that an interrupted run has left
        lacking = step - (version if kept else self._version)
        if lacking != step - version or lacking > self.ahead:
            raise StalenessError(
                f"rows of step {step + 1} would lack {lacking} updates instead of {step - version}, and "
                f"pipeline.staleness is {self.ahead}; the schedule is broken, which is a bug of TurboGR. The last "
                "checkpoint is sound: continue from it with --resume and pipeline.mode=sync"
            )
        return lacking

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
    """Every row is read after all earlier updates of it, and as late as that demands; the rest runs beside computing.

    No row is sent twice: what a batch shares with the one before is not read early. Of that, the rows of its inputs are
    all that a step waits for; those of its loss alone arrive while its forward pass runs (`WorkingSet.late`), and
    gradients that come from the loss alone leave when the backward begins (`WorkingSet.early`).
    """

    ahead = 1

    def __init__(self, stepper: Stepper, timeline: Timeline, depth: int, make_worker: MakeWorker = Threaded) -> None:
        super().__init__(stepper, timeline, depth, make_worker)
        self._previous: Flight | None = None
        self._before, self._shared = (Marks(stepper.table.weight) for _ in range(2))
        self._late: dict[int, Job] = {}
        self._early: dict[int, Job] = {}

    def flights(self, loader: Loader, first: int, limit: int | None) -> Generator[Flight, None, None]:
        self._previous, self._late, self._early = None, {}, {}
        yield from super().flights(loader, first, limit)

    def _wait(self, flight: Flight) -> Flight:
        flight = super()._wait(flight)
        table, request = self._tables["wait"], flight.asked
        inputs = marked(request.ids, [request.index[: flight.batch.num_tokens]])
        touched = table.touched(request, inputs)
        if self._previous is not None:
            shared = _shared(touched.ranks, self._before.of(touched.slots))
            flight.rows_read, flight.rows_shared = shared.numel(), int((shared != _REST).sum())
            if flight.step > self._first:
                self._shared.set(touched.slots, shared)
                self._previous.after = _divided(table, self._previous.asked, self._shared)
                flight.before = _divided(table, request, self._shared)
        self._before.set(*touched)
        self._previous = flight
        return flight

    def _read(self, flight: Flight) -> Tensor:
        table, parts = self._tables["embed"], flight.before
        if parts is None:
            return table.receive(table.answer(flight.asked))
        rows = table.weight.new_empty(flight.asked.ids.numel(), table.dim)
        return rows.index_copy_(0, parts.rest.places, table.receive(table.answer(parts.rest.request)))

    def fetch(self, flight: Flight) -> WorkingSet:
        table, parts = self.stepper.table, flight.before
        with self.timeline.span("main", "embed", flight.step):
            coming = None if parts is None else table.answer(parts.now.request)
            rows: Tensor = self._wait_for(self._reads.pop(flight.step), flight)
            if parts is not None:
                rows.index_copy_(0, parts.now.places, table.receive(coming))
        clips = self.stepper.config.optimizer.clip_norm is not None
        early = None if clips else partial(self._collect_early_later, flight)
        return replace(table.working_set(flight.asked, rows), late=partial(self._complete, flight), early=early)

    def _complete(self, flight: Flight) -> None:
        """Wait for the rows of a batch that its loss alone needs."""
        if flight.step in self._late:
            with self.timeline.span("main", "embed", flight.step):
                self._wait_for(self._late.pop(flight.step), flight)

    def _know_after(self, flight: Flight) -> Parts | None:
        """Wait until the next batch has set `after`."""
        if flight.step + 1 < self._end:
            self._wait_for(self._fronts[flight.step + 1])
        return flight.after

    def _collect_early_later(self, flight: Flight, grad: Tensor) -> None:
        """Post the sum of gradients that are complete when the backward begins."""
        if self._know_after(flight) is not None:
            self._early[flight.step] = self._workers["embed"].post(self._collect_early, flight.step, flight, grad)

    def _collect_early(self, flight: Flight, grad: Tensor) -> RowGradients:
        assert flight.after is not None
        table = self._tables["embed"]
        return table.collect(_send_back(table, flight.after.early, grad))

    def reduce(self, flight: Flight, working_set: WorkingSet) -> Reduced:
        self._complete(flight)  # a rank without tokens has not called for them
        table, parts = self.stepper.table, self._know_after(flight)
        if self.stepper.config.optimizer.clip_norm is not None:
            return super().reduce(flight, working_set)
        if flight.step not in self._early:  # nor has its backward begun
            self._collect_early_later(flight, gradient_of(working_set.rows))
        with self.timeline.span("main", "reduce", flight.step):
            self.stepper.gradients.start()
            sent = None if parts is None else _send_back(table, parts.now, gradient_of(working_set.rows))
            self.stepper.gradients.finish()
            return Reduced(None if sent is None else table.collect(sent), False)

    def update(
        self, flight: Flight, working_set: WorkingSet, reduced: Reduced, grad_norm: float, factor: float
    ) -> None:
        if reduced.complete:
            super().update(flight, working_set, reduced, grad_norm, factor)
            self._catch_up_later(flight, None, None)
            return
        number = self.stepper.rows.begin()
        with self.timeline.span("main", "update", flight.step):
            self.stepper.update_dense(factor)
            if reduced.rows is not None:
                self.stepper.update_rows(reduced.rows, factor, number)
        grad = gradient_of(working_set.rows)
        update = partial(self.stepper.update_rows, factor=factor, number=number)
        caught_up = self._catch_up_later(flight, grad, update)
        done = [] if reduced.rows is None else [reduced.rows.slots]
        self._update_later(self._update_rest, flight, grad, update, done, caught_up)

    def _catch_up_later(self, flight: Flight, grad: Tensor | None, update: _UpdateRows | None) -> Job | None:
        """Post what the forward pass of the next batch must not wait for and its loss must."""
        if flight.after is None:
            return None
        following = flight.step + 1
        self._late[following] = self._workers["embed"].post(
            self._catch_up,
            following,
            flight,
            self._fronts[following],
            self._reads[following],
            self._early.pop(flight.step, None),
            grad,
            update,
        )
        return self._late[following]

    def _catch_up(
        self,
        flight: Flight,
        following: Flight,
        rows: Tensor,
        early: RowGradients | None,
        grad: Tensor | None,
        update: _UpdateRows | None,
    ) -> Tensor | None:
        """Update the rows that the loss of the following batch alone needs, send them, and put in what comes.

        Without `update` that has been done. Returns the slots that are updated here.
        """
        assert flight.after is not None and following.before is not None
        updated = None
        if update is not None:
            assert early is not None and grad is not None
            update(early)
            updated = torch.cat([early.slots, self._update_part(flight.after.soon, grad, update)])
        table, parts = self._tables["embed"], (following.before.early, following.before.soon)
        coming = [table.answer(part.request) for part in parts]
        for part, reply in zip(parts, coming, strict=True):
            rows.detach().index_copy_(0, part.places, table.receive(reply))
        return updated

    def _update_part(self, part: Part, grad: Tensor, update: _UpdateRows) -> Tensor:
        table = self._tables["embed"]
        rows = table.collect(_send_back(table, part, grad))
        update(rows)
        return rows.slots

    def _update_rest(
        self, flight: Flight, grad: Tensor, update: _UpdateRows, done: list[Tensor], caught_up: Tensor | None
    ) -> Tensor:
        if flight.after is None:
            everything = Part(torch.arange(grad.shape[0], device=grad.device), flight.asked)
            return self._update_part(everything, grad, update)
        assert caught_up is not None
        return torch.cat([self._update_part(flight.after.rest, grad, update), caught_up, *done])


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


def _shared(ranks: Tensor, ranks_before: Tensor) -> Tensor:
    """What two batches do with rows that have these ranks [n] in the later one and, 0 for absent, in the earlier."""
    shared = ranks * (ranks_before > 0)
    shared[(shared == _SOON) & (ranks_before == 1)] = _EARLY
    return shared


def _divided(table: Table, request: Request, shared: Marks) -> Parts:
    """Divide a request by `shared`, what batches do with the rows of this process's table."""
    theirs = shared.of(request.slots)
    mine = table.tell(request, theirs)
    return Parts(
        *(
            Part((mine == kind).nonzero().flatten(), table.part(request, mine == kind, theirs == kind))
            for kind in (_NOW, _SOON, _EARLY, _REST)
        )
    )


def _send_back(table: Table, part: Part, grad: Tensor) -> Any:
    """Send the gradients of a part of a batch's rows to their owners; `grad` [R, d] is of all of them."""
    return table.send_back(part.request, grad.index_select(0, part.places))


def _num_left(loader: Loader, limit: int | None) -> int:
    """Batches left of the epoch, at most `limit`."""
    position = loader.state_dict()
    left = loader.num_batches(position["epoch"]) - position["step"]
    return left if limit is None else min(left, limit)
