"""Launches of Triton's kernels for losses: sampled softmax with candidates of each position or of groups, full softmax.

Scores are never stored: the backward computes them again from the logarithm of each position's sum. What is as long as
the candidates are the sorted places of every row, and where groups share candidates, a gradient for each of those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.ops.triton_kernels.launching import (
    TileMap,
    candidate_tile,
    input_precision,
    map_tiles,
    row_tile,
    score_chunks,
    score_tile,
)
from turbogr.ops.triton_passes import check_width, sort_by_row, sum_duplicates
from turbogr.ops.triton_runtime import is_interpreting, kernel, precision_of, target_of

_NARROW = {"fp16": torch.float16, "int8": torch.int8}


class Scoring(NamedTuple):
    """Vectors, and what makes logits of them. Tensors that are not needed are any others, which are not read.

    `narrow_rows` are the rows in the precision of candidates, `row_scales` what makes unit vectors of those, if
    `is_scaled`. `candidates` [T, n], or [G, n] with `offsets` of the groups; all rows if they are None.
    """

    queries: Tensor
    rows: Tensor
    narrow_rows: Tensor
    inverse_queries: Tensor
    inverse_rows: Tensor
    row_scales: Tensor
    positives: Tensor
    candidates: Tensor | None
    offsets: Tensor | None
    log_q: Tensor | None
    temperature: float
    normalize: bool
    is_scaled: bool

    @property
    def num_candidates(self) -> int:
        """How many candidates a position or a group has."""
        return self.rows.shape[0] if self.candidates is None else self.candidates.shape[1]


def prepare(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    candidates: Tensor | None,
    groups: Tensor | None,
    log_q: Tensor | None,
    temperature: float,
    normalize: bool,
    precision: str,
) -> Scoring:
    """Lengths of all vectors, and the rows in the precision of candidates."""
    check_width(queries.shape[1])
    queries, rows = queries.contiguous(), rows.contiguous()
    inverse_queries, *_ = _unit_rows(queries, normalize, "fp32")
    inverse_rows, narrow_rows, scales = _unit_rows(rows, normalize, precision)
    return Scoring(
        *(queries, rows, narrow_rows, inverse_queries, inverse_rows),
        scales if precision == "int8" else inverse_rows,
        positives.contiguous(),
        None if candidates is None else candidates.contiguous(),
        None if groups is None else groups.contiguous(),
        None if log_q is None else log_q.to(torch.float32).contiguous(),
        *(temperature, normalize),
        is_scaled=precision == "int8" or (normalize and precision == "fp32"),
    )


def _unit_rows(x: Tensor, normalize: bool, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse lengths, the rows in a precision (themselves in fp32), and their scales in int8."""
    num_rows, width = x.shape
    inverse = x.new_empty(num_rows if normalize else 0, dtype=torch.float32)
    narrowed = torch.empty_like(x, dtype=_NARROW[precision]) if precision in _NARROW else x
    scales = x.new_empty(num_rows if precision == "int8" else 0, dtype=torch.float32)
    if num_rows and (normalize or precision in _NARROW):
        tile = row_tile(width, target_of(x))
        kernel("candidate_scores", "unit_rows")[(-(-num_rows // tile.block_q),)](
            *(x, inverse, narrowed, scales, num_rows, width),
            ROWS=tile.block_q,
            BLOCK=tile.block_k,
            NORM=normalize,
            FORMAT=precision,
            **tile.options(),
        )
    return inverse, narrowed, scales


def _to_vectors(x: Tensor, inverse: Tensor, grad: Tensor, normalize: bool) -> Tensor:
    """The gradient of vectors, for that of the same vectors of unit length, fp32."""
    if not normalize:
        return grad.to(x.dtype)
    out = torch.empty_like(x)
    if x.numel():
        tile = row_tile(x.shape[1], target_of(x))
        kernel("candidate_scores", "unit_rows_backward")[(-(-x.shape[0] // tile.block_q),)](
            *(x, inverse, grad, out, *x.shape),
            ROWS=tile.block_q,
            BLOCK=tile.block_k,
            INTERPRETED=is_interpreting(),
            **tile.options(),
        )
    return out


def loss_forward(s: Scoring) -> tuple[Tensor, Tensor]:
    """The loss [T] and the logarithms of the sums [T]."""
    loss = s.queries.new_empty(s.queries.shape[0])
    log_sums = torch.empty_like(loss, dtype=torch.float32)
    if loss.numel() and _is_shared(s):
        tile = score_tile(_precision(s), target_of(loss))
        rows = _tiles(s, tile.block_q)
        kernel("shared_scores", "shared_forward")[(rows.tile_sequence.numel(),)](
            *_inputs(s), _offsets(s), *rows, loss, log_sums, *_numbers(s), **_shared_options(s, tile)
        )
    elif loss.numel():
        tile = candidate_tile(s.queries.shape[1])
        kernel("candidate_scores", "score_candidates")[(loss.numel(),)](
            *(*_inputs(s), loss, log_sums, *_numbers(s)),
            LOGITS=False,
            INTERPRETED=is_interpreting(),
            **_own_options(s, tile),
        )
    return loss, log_sums


def loss_backward(s: Scoring, grad: Tensor, loss: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and of the rows."""
    grad = grad.contiguous()
    unit = torch.zeros_like(s.queries, dtype=torch.float32)
    if not grad.numel():
        return unit.to(s.queries.dtype), torch.zeros_like(s.rows)
    width, target = s.queries.shape[1], target_of(grad)
    if not _is_shared(s):
        tile = candidate_tile(width)
        kernel("candidate_scores", "candidates_backward_queries")[(grad.numel(),)](
            grad, *_inputs(s), loss, log_sums, unit, *_numbers(s), LOGITS=False, **_own_options(s, tile)
        )
        assert s.candidates is not None
        places = torch.cat([s.positives, s.candidates.flatten().to(s.positives.dtype)])
        grad_rows = _gradient_by_row(s, grad, loss, log_sums, places, logits=False)
    else:
        tile, out = score_tile(_precision(s), target), score_chunks(width)[1]
        rows = _tiles(s, tile.block_q)
        kernel("shared_scores", "shared_backward_queries")[(rows.tile_sequence.numel(), -(-width // out))](
            *(grad, *_inputs(s), _offsets(s), *rows, loss, log_sums, unit, *_numbers(s)),
            OUT=out,
            **_shared_options(s, tile),
        )
        grad_rows = _gradient_of_shared(s, grad, log_sums)
        # What positives get: the loss is the negative logarithm of their share.
        share = torch.expm1(-loss.float()) * grad / s.temperature
        share = share * s.inverse_queries if s.normalize else share
        grad_rows += sum_duplicates(s.queries * share[:, None], s.positives, s.rows.shape[0])
    grad_queries = _to_vectors(s.queries, s.inverse_queries, unit, s.normalize)
    return grad_queries, _to_vectors(s.rows, s.inverse_rows, grad_rows, s.normalize)


def _gradient_of_shared(s: Scoring, grad: Tensor, log_sums: Tensor) -> Tensor:
    """The gradient [R, d] fp32 of the rows of unit length as candidates of groups."""
    (num_rows, width), count = s.rows.shape, s.num_candidates
    tile, out = score_tile(_precision(s), target_of(grad), backward_rows=True), score_chunks(width)[1]
    offsets = _offsets(s)
    num_groups, num_tiles = offsets.numel() - 1, -(-count // tile.block_k)
    found = torch.empty(num_groups * count, width, dtype=torch.float32, device=grad.device)
    if found.numel():
        queries, _, *others = _inputs(s)
        narrow_rows, positives, candidates, log_q, inverse_queries, _, row_scales = others
        kernel("shared_scores", "shared_backward_rows")[(num_groups * num_tiles, -(-width // out))](
            *(grad, queries, narrow_rows, positives, candidates, log_q, inverse_queries, row_scales, offsets),
            *(log_sums, found, count, num_tiles, width, 1 / s.temperature),
            OUT=out,
            **_shared_options(s, tile),
        )
    return found if s.candidates is None else sum_duplicates(found, s.candidates.flatten(), num_rows)


def logits_forward(s: Scoring) -> Tensor:
    """The logits of every position's candidates, [T, n]."""
    assert s.candidates is not None
    out = s.queries.new_empty(s.candidates.shape)
    if out.numel():
        tile = candidate_tile(s.queries.shape[1])
        kernel("candidate_scores", "score_candidates")[(out.shape[0],)](
            *(*_inputs(s), out, out, *_numbers(s)),
            LOGITS=True,
            INTERPRETED=is_interpreting(),
            **_own_options(s, tile),
        )
    return out


def logits_backward(s: Scoring, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and of the rows."""
    assert s.candidates is not None
    grad = grad.contiguous()
    if not grad.numel():
        return torch.zeros_like(s.queries), torch.zeros_like(s.rows)
    unit = torch.empty_like(s.queries, dtype=torch.float32)
    tile = candidate_tile(s.queries.shape[1])
    kernel("candidate_scores", "candidates_backward_queries")[(grad.shape[0],)](
        grad, *_inputs(s), grad, grad, unit, *_numbers(s), LOGITS=True, **_own_options(s, tile)
    )
    grad_rows = _gradient_by_row(s, grad, grad, grad, s.candidates.flatten(), logits=True)
    grad_queries = _to_vectors(s.queries, s.inverse_queries, unit, s.normalize)
    return grad_queries, _to_vectors(s.rows, s.inverse_rows, grad_rows, s.normalize)


def _gradient_by_row(
    s: Scoring, grad: Tensor, loss: Tensor, log_sums: Tensor, places: Tensor, *, logits: bool
) -> Tensor:
    """The gradient [R, d] fp32 of the rows of unit length, summed over the places that use each."""
    out = torch.empty_like(s.rows, dtype=torch.float32)
    tile = candidate_tile(s.rows.shape[1])
    queries, _, narrow_rows, positives, _, log_q, inverse_queries, _, row_scales = _inputs(s)
    count, width, inverse_temperature = _numbers(s)
    kernel("candidate_scores", "candidates_backward_rows")[(s.rows.shape[0],)](
        *(grad, queries, narrow_rows, positives, log_q, inverse_queries, row_scales, loss, log_sums),
        *(*sort_by_row(places, s.rows.shape[0]), out, s.queries.shape[0], count, width, inverse_temperature),
        LOGITS=logits,
        **_own_options(s, tile),
    )
    return out


def _is_shared(s: Scoring) -> bool:
    return s.candidates is None or s.offsets is not None


def _precision(s: Scoring) -> str:
    """That of products: rows and queries are read as fp32, and bf16 is exact in TF32."""
    precision = precision_of(s.queries)
    return "tf32" if precision == "bf16" else precision


def _inputs(s: Scoring) -> tuple[Tensor, ...]:
    """Queries, rows, rows in the precision of candidates, positives, candidates, log_q, and lengths and scales."""
    candidates = s.positives if s.candidates is None else s.candidates
    log_q = s.inverse_rows if s.log_q is None else s.log_q
    vectors = (s.queries, s.rows, s.narrow_rows, s.positives, candidates)
    return (*vectors, log_q, s.inverse_queries, s.inverse_rows, s.row_scales)


def _numbers(s: Scoring) -> tuple[int, int, float]:
    return s.num_candidates, s.queries.shape[1], 1 / s.temperature


def _offsets(s: Scoring) -> Tensor:
    if s.offsets is not None:
        return s.offsets
    num_positions = s.queries.shape[0]
    return torch.arange(0, num_positions + 1, num_positions, device=s.queries.device)


def _tiles(s: Scoring, block: int) -> TileMap:
    return map_tiles(_offsets(s), s.queries.shape[0], block)


def _options(s: Scoring) -> dict[str, Any]:
    return {"NORM": s.normalize, "SCALED": s.is_scaled, "LOG_Q": s.log_q is not None}


def _own_options(s: Scoring, tile: Any) -> dict[str, Any]:
    return {"STEP": tile.block_q, "BLOCK": tile.block_k, **_options(s), **tile.options()}


def _shared_options(s: Scoring, tile: Any) -> dict[str, Any]:
    return {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "CHUNK": score_chunks(s.queries.shape[1])[0],
        "ALL": s.candidates is None,
        "PRECISION": input_precision(_precision(s), target_of(s.queries)),
        "INTERPRETED": is_interpreting(),
        **_options(s),
        **tile.options(),
    }
