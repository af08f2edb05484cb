"""The loss in segments of positions: only two segments' vectors are ever on the device.

Rows stay where they are, in host memory. A worker finds the distinct rows of the next segment and brings them over
while this one is scored, forward and backward; gradients go back and are added in the order of the segments. So the
memory of the device depends on the budget and not on the number of negatives, and the result is that of the loss in one
piece up to the order of sums. On a CPU the device is the same memory, and the budget bounds what comes on top of the
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turbogr.ops import sampled_softmax, unique_rows
from turbogr.ops.sampled_softmax import Precision

_SLOTS = 2


class Link(Protocol):
    """The way between host memory and a device; the worker calls it, one call at a time."""

    def bring(self, rows: Tensor, ids: Tensor, buffer: Tensor) -> None:
        """Write rows[ids] to `buffer` [n, d] on the device, and return when they are there."""
        ...

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor) -> None:
        """Add a `gradient` [n, d] on the device to total[ids] in host memory; no id comes twice."""
        ...


class HostLink:
    """Copies through pinned memory and on a stream of its own, so that an accelerator computes meanwhile."""

    def bring(self, rows: Tensor, ids: Tensor, buffer: Tensor) -> None:
        if buffer.device == rows.device:
            torch.index_select(rows, 0, ids, out=buffer)
            return
        staged = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        torch.index_select(rows, 0, ids, out=staged)
        stream = torch.Stream(buffer.device)
        with stream:
            buffer.copy_(staged, non_blocking=True)
        stream.synchronize()

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor) -> None:
        total.index_add_(0, ids, gradient.to(total.device))


class Problem(NamedTuple):
    """Arguments of `sampled_softmax` that do not change from segment to segment, and how to move rows."""

    positives: Tensor
    negatives: Tensor
    groups: Tensor | None
    log_q: Tensor | None
    temperature: float
    precision: Precision
    bounds: Sequence[int]
    link: Link


class Segment(NamedTuple):
    """Positions `first` to `last`, their distinct rows `ids` [n] and vectors, and where each id finds them."""

    first: int
    last: int
    ids: Tensor
    rows: Tensor
    positives: Tensor
    negatives: Tensor
    groups: Tensor | None


def segmented_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    temperature: float,
    log_q: Tensor | None,
    groups: Tensor | None,
    precision: Precision,
    budget_bytes: float,
    link: Link | None = None,
) -> Tensor:
    """Return what `sampled_softmax` does, with at most about `budget_bytes` of rows on the queries' device at once.

    A segment is one group of positions at least, whatever the budget.
    """
    bounds = segment_bounds(negatives.shape, queries.shape, budget_bytes)
    problem = Problem(
        positives, negatives, groups, log_q, temperature, precision, bounds, HostLink() if link is None else link
    )
    loss: Tensor = _Segmented.apply(queries, rows, problem)  # type: ignore[no-untyped-call]
    return loss


def segment_bounds(negatives: Sequence[int], queries: Sequence[int], budget_bytes: float) -> list[int]:
    """Cut groups with `negatives` (G, n) and positions with `queries` (T, d) into segments: bounds of the groups."""
    num_groups, num_negatives = negatives
    num_positions, width = queries
    per_group = num_negatives + num_positions / max(1, num_groups)
    size = max(1, int(budget_bytes / (_SLOTS * 4 * width * per_group)))
    return [*range(0, num_groups, size), num_groups]


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, problem: Problem) -> Tensor:
        ctx.save_for_backward(queries, rows)
        ctx.problem = problem
        loss = queries.new_empty(queries.shape[0])
        with _Worker(rows, problem, queries.device) as worker:
            for segment in worker.segments():
                loss[segment.first : segment.last] = _score(
                    problem, segment, queries[segment.first : segment.last], segment.rows
                )
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        queries, rows = ctx.saved_tensors
        problem: Problem = ctx.problem
        grad_queries, grad_rows = torch.empty_like(queries), torch.zeros_like(rows)
        with _Worker(rows, problem, queries.device) as worker:
            for segment in worker.segments():
                part = slice(segment.first, segment.last)
                leaves = queries[part].detach().requires_grad_(), segment.rows.detach().requires_grad_()
                with torch.enable_grad():
                    loss = _score(problem, segment, *leaves)
                grad_queries[part], grad = torch.autograd.grad(loss, leaves, grads[0][part])
                worker.return_(grad, segment.ids, grad_rows)
        return grad_queries, grad_rows, None


def _score(problem: Problem, segment: Segment, queries: Tensor, rows: Tensor) -> Tensor:
    return sampled_softmax(
        queries,
        rows,
        segment.positives,
        segment.negatives,
        temperature=problem.temperature,
        log_q=None if problem.log_q is None else problem.log_q.index_select(0, segment.ids).to(rows.device),
        groups=segment.groups,
        precision=problem.precision,
    )


class _Worker:
    """Brings segments one ahead and returns gradients, in order, on a thread of its own."""

    def __init__(self, rows: Tensor, problem: Problem, device: torch.device) -> None:
        self.rows, self.problem = rows.detach(), problem
        largest = max((last - first for first, last in pairwise(problem.bounds)), default=0)
        members = 1 if problem.groups is None else int(problem.groups.diff().max())
        room = min(rows.shape[0], largest * (problem.negatives.shape[1] + members))
        self.buffers = [torch.empty(room, rows.shape[1], device=device) for _ in range(_SLOTS)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="turbogr-offload")
        self._returning: Future[None] | None = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=exception[0] is not None)
        if self._returning is not None and exception[0] is None:
            self._returning.result()

    def segments(self) -> Iterator[Segment]:
        """Yield the segments; one is valid until the next but one is asked for."""
        waiting: Future[Segment] | None = None
        for number, (first, last) in enumerate(pairwise(self.problem.bounds)):
            coming = self._pool.submit(self._bring, first, last, self.buffers[number % _SLOTS])
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor) -> None:
        """Add a segment's gradient to the total, after that of the segment before."""
        if self._returning is not None:
            self._returning.result()
        self._returning = self._pool.submit(self.problem.link.return_, gradient, ids, total)

    def _bring(self, first: int, last: int, buffer: Tensor) -> Segment:
        problem = self.problem
        groups, begin, end = problem.groups, first, last
        if groups is not None:
            begin, end = int(groups[first]), int(groups[last])
            groups = groups[first : last + 1] - begin
        negatives = problem.negatives[first:last]
        pieces = [problem.positives[begin:end].contiguous(), negatives.contiguous()]
        ids, index = unique_rows(pieces, self.rows.shape[0])
        vectors = buffer[: ids.numel()]
        problem.link.bring(self.rows, ids, vectors)
        index = index.to(buffer.device)
        return Segment(
            begin, end, ids, vectors, index[: end - begin], index[end - begin :].view(negatives.shape), groups
        )
