"""The loss in segments of positions: the vectors of one or two segments are on the device, never all of them.

Rows stay in host memory. While one segment is scored, a worker finds the distinct rows of the next segment and copies
them to the device as unit vectors, in the forward and in the backward pass. Gradients are copied back and added in the
order of the segments. So the memory of the device depends on the budget, not on the number of negatives, and the result
is that of the loss in one piece, up to the order of sums.

On a CPU the device is the host. Segments are scored one after another, and the budget limits the memory besides the
rows. If a copy of all rows in the negatives' precision fits into the budget, there are no segments: the compiled
operator reads the rows itself, in portions. The reference operator builds a vector for every pair of a position and a
negative, so its segments are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.negatives.host_link import Link, Units, link_to
from turbogr.negatives.sharing import SharedNegatives
from turbogr.ops import sampled_softmax, unique_rows
from turbogr.ops.sampled_softmax import NORM_EPS, Precision, reads_rows_in_place
from turbogr.ops.sampled_softmax.reference import unit

_SLOTS = 2
_BYTES_OF_PAIR = 16  # a negative's id and its place, and of a position its probability and a term of the sums
_COPIES_OF_PAIR = 4  # the reference's vectors of the negatives, their gradient, and both laid out for a product
_BYTES: dict[Precision, int] = {"fp32": 4, "fp16": 2, "int8": 1}
_ROWS_AT_ONCE = 4096


class Problem(NamedTuple):
    """Arguments of `sampled_softmax` that do not change from segment to segment, and how to move rows."""

    positives: Tensor
    negatives: Tensor | SharedNegatives
    groups: Tensor | None
    log_q: Tensor | None
    temperature: float
    precision: Precision
    bounds: Sequence[int]
    link: Link


class Segment(NamedTuple):
    """Positions `first` to `last`, their distinct rows `ids` [n] and unit vectors, and where each id finds them."""

    first: int
    last: int
    ids: Tensor
    vectors: Tensor
    positives: Tensor
    negatives: Tensor
    groups: Tensor | None
    log_q: Tensor | None


def segmented_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor | SharedNegatives,
    *,
    temperature: float,
    log_q: Tensor | None,
    groups: Tensor | None,
    precision: Precision,
    budget_bytes: float,
    link: Link | None = None,
) -> Tensor:
    """Return what `sampled_softmax` does, with about `budget_bytes` on the queries' device besides the queries.

    Where that device is the host, rows are in its memory already and so are their gradients; these come on top.
    Negatives that positions take of others are chosen segment by segment, or within the budget.
    `rows` and ids may be in another memory than the queries. A segment is one group of positions at least, whatever
    the budget.
    """
    in_place, made = reads_rows_in_place(queries), rows.numel() * _BYTES[precision]
    if isinstance(negatives, SharedNegatives):
        made += math.prod(negatives.shape) * negatives.negatives.element_size()
    if link is None and queries.device == rows.device and in_place and made <= budget_bytes:
        return sampled_softmax(
            queries,
            rows,
            positives,
            negatives[:],
            temperature=temperature,
            log_q=log_q,
            groups=groups,
            precision=precision,
            keep=False,
        )
    link = link_to(queries.device, rows.device, precision) if link is None else link
    bounds = segment_bounds(negatives.shape, queries.shape, rows.shape[0], budget_bytes, in_place=in_place)
    problem = Problem(positives, negatives, groups, log_q, temperature, precision, bounds, link)
    loss: Tensor = _Segmented.apply(queries, rows, problem)  # type: ignore[no-untyped-call]
    return loss


def segment_bounds(
    negatives: Sequence[int], queries: Sequence[int], num_rows: int, budget_bytes: float, *, in_place: bool = True
) -> list[int]:
    """Cut groups with `negatives` (G, n) and positions with `queries` (T, d) into segments: bounds of the groups.

    The budget holds the vectors of two segments and their gradients, no more rows than there are, and what is kept
    for every pair of a position and a negative: a few vectors too, unless rows are read `in_place`.
    """
    num_groups, num_negatives = negatives
    num_positions, width = queries
    members = num_positions / max(1, num_groups)
    row_bytes = 2 * _SLOTS * 4 * width
    rows_of_group = num_negatives + members
    pair_bytes = _BYTES_OF_PAIR + (0 if in_place else _COPIES_OF_PAIR * 4 * width)
    pairs_bytes = max(1.0, num_negatives * members) * pair_bytes
    size = budget_bytes / (rows_of_group * row_bytes + pairs_bytes)
    if size * rows_of_group > num_rows:
        size = max(size, (budget_bytes - num_rows * row_bytes) / pairs_bytes)
    return [*range(0, num_groups, max(1, int(size))), num_groups]


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, problem: Problem) -> Tensor:
        length = torch.linalg.vector_norm(rows, dim=1)
        units = Units(rows.detach(), length.clamp_(min=NORM_EPS).reciprocal_())
        ctx.save_for_backward(queries, *units)
        ctx.problem = problem
        loss = queries.new_empty(queries.shape[0])
        with _Segments(units, problem, queries.device) as segments:
            for segment in segments:
                part = slice(segment.first, segment.last)
                loss[part] = _score(problem, segment, queries[part], segment.vectors)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        queries, *saved = ctx.saved_tensors
        problem, units = ctx.problem, Units(*saved)
        grad_queries, grad_rows = torch.empty_like(queries), torch.zeros_like(units.rows)
        with _Segments(units, problem, queries.device) as segments:
            for segment in segments:
                part = slice(segment.first, segment.last)
                leaves = queries[part].detach().requires_grad_(), segment.vectors.detach().requires_grad_()
                with torch.enable_grad():
                    loss = _score(problem, segment, *leaves)
                grad_queries[part], grad = torch.autograd.grad(loss, leaves, grads[0][part])
                segments.return_(grad, segment.ids, grad_rows)
        _through_norm(units, grad_rows)
        return grad_queries, grad_rows, None


def _score(problem: Problem, segment: Segment, queries: Tensor, vectors: Tensor) -> Tensor:
    return sampled_softmax(
        unit(queries),
        vectors,
        segment.positives,
        segment.negatives,
        temperature=problem.temperature,
        normalize=False,
        log_q=segment.log_q,
        groups=segment.groups,
        precision=problem.precision,
    )


def _through_norm(units: Units, gradient: Tensor) -> None:
    """Turn the gradient of the unit vectors into that of the rows, in place, some rows at a time."""
    for rows, inverse, part in zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in (*units, gradient)), strict=True):
        vectors = rows * inverse[:, None]
        along = (vectors * part).sum(1, keepdim=True)
        along[inverse >= 1 / NORM_EPS] = 0.0  # too short to be scaled to unit length
        part.addcmul_(vectors, along, value=-1).mul_(inverse[:, None])


class _Segments:
    """Brings segments and takes gradients back, in order; where copies overlap, on a thread and one segment ahead."""

    def __init__(self, units: Units, problem: Problem, device: torch.device) -> None:
        self.units, self.problem, self.link = units, problem, problem.link
        largest = max((last - first for first, last in pairwise(problem.bounds)), default=0)
        members = 1 if problem.groups is None else int(problem.groups.diff().max())
        rows = units.rows
        room = min(rows.shape[0], largest * (problem.negatives.shape[1] + members))
        slots = _SLOTS if self.link.overlaps else 1
        self._buffers = [torch.empty(room, rows.shape[1], dtype=rows.dtype, device=device) for _ in range(slots)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="turbogr-offload") if self.link.overlaps else None
        self._returning: Future[None] | None = None

    def __enter__(self) -> _Segments:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=True, cancel_futures=exception[0] is not None)
        if self._returning is not None and exception[0] is None:
            self._returning.result()

    def __iter__(self) -> Iterator[Segment]:
        """Yield the segments; one is valid until the next is asked for."""
        waiting: Future[Segment] | None = None
        for number, (first, last) in enumerate(pairwise(self.problem.bounds)):
            job = (first, last, self._buffers[number % len(self._buffers)], self.link.mark())
            if self._pool is None:
                yield self._bring(*job)
                continue
            coming = self._pool.submit(self._bring, *job)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor) -> None:
        """Add a segment's gradient to the total, after that of the segment before."""
        job = (gradient, ids, total, self.link.mark())
        if self._pool is None:
            self.link.return_(*job)
            return
        if self._returning is not None:
            self._returning.result()
        self._returning = self._pool.submit(self.link.return_, *job)

    def _bring(self, first: int, last: int, buffer: Tensor, after: Any) -> Segment:
        problem = self.problem
        groups, begin, end = problem.groups, first, last
        if groups is not None:
            begin, end = int(groups[first]), int(groups[last])
            groups = groups[first : last + 1] - begin
        negatives = problem.negatives[first:last]
        pieces = [problem.positives[begin:end].contiguous(), negatives.contiguous()]
        ids, index = unique_rows(pieces, self.units.rows.shape[0])
        log_q = None if problem.log_q is None else problem.log_q.index_select(0, ids)
        vectors, small = buffer[: ids.numel()], [index, groups, log_q]
        beside = [tensor for tensor in small if tensor is not None]
        index, *rest = self.link.bring(self.units, ids, index[: end - begin], vectors, after, beside)
        groups, log_q = (None if tensor is None else rest.pop(0) for tensor in (groups, log_q))
        positives, places = index[: end - begin], index[end - begin :].view(negatives.shape)
        return Segment(begin, end, ids, vectors, positives, places, groups, log_q)
