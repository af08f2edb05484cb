"""Launches of Triton's passes over rows, which several operators share; see `triton_kernels/row_passes.py`.

Matrix products between them are those of the device's library. Products with parameters take the parameter in the type
of the activations; the gradients of parameters are sums in fp32 (`precision.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.ops.native import dropout_arguments
from turbogr.ops.triton_kernels.launching import MAX_WIDTH, Tile, element_tile, row_tile, segment_tile
from turbogr.ops.triton_runtime import is_interpreting, kernel, target_of


class DropoutWords(NamedTuple):
    """Arguments of a kernel that drops: the keys seen as words, the seed's words, the threshold and the scale.

    Without dropout the keys are any tensor, which is not read.
    """

    key_words: Tensor
    seed_low: int
    seed_high: int
    threshold: int
    keep_scale: float
    is_given: bool


def dropout_words(keys: Tensor | None, rate: float, seed: int, instead: Tensor) -> DropoutWords:
    """The words for a rate and a seed; `instead` stands for the keys where nothing is dropped."""
    if keys is None or rate == 0.0:
        return DropoutWords(instead, 0, 0, 0, 1.0, False)
    seed, threshold, scale = dropout_arguments(rate, seed)
    return DropoutWords(key_words(keys), *seed_words(seed), signed(threshold), scale, True)


def key_words(keys: Tensor) -> Tensor:
    """Keys [T] int64 as words, the lower one of each first."""
    return keys.to(torch.int64).contiguous().view(torch.int32)


def seed_words(seed: int) -> tuple[int, int]:
    """The lower and the upper word of a seed."""
    return signed(seed & 0xFFFFFFFF), signed(seed >> 32 & 0xFFFFFFFF)


def signed(word: int) -> int:
    """The int32 with the bits of a word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def normalize(
    x: Tensor, gate: Tensor | None, norm: str, eps: float, drop: DropoutWords | None = None
) -> tuple[Tensor, Tensor]:
    """dropout(gate * norm(x)), and the moments [2, T] for the backward."""
    num_rows, width = x.shape
    check_width(width)
    out, moments = x.new_empty(x.shape), empty_moments(x, norm)
    if x.numel():
        drop = drop or dropout_words(None, 0.0, 0, x)
        tile, other = row_tile(width, target_of(x)), x if gate is None else gate
        kernel("row_passes", "normalize_rows")[(_ceil(num_rows, tile.block_q),)](
            *(x, other, drop.key_words, out, moments, num_rows, width, x.stride(0), other.stride(0)),
            *(*drop[1:5], eps),
            NORM=norm,
            GATED=gate is not None,
            DROPOUT=drop.is_given,
            **_sizes(tile),
        )
    return out, moments


class NormGradients(NamedTuple):
    """Gradients of x and of the gate, and the rows that `normalize` had returned."""

    grad_x: Tensor
    grad_gate: Tensor
    rows: Tensor


def normalize_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor | None,
    moments: Tensor,
    norm: str,
    drop: DropoutWords | None = None,
    residual_grad: Tensor | None = None,
) -> NormGradients:
    """The gradients, for `grad` of what `normalize` returned, whose memory is used again; plus a residual's for x."""
    num_rows, width = x.shape
    grad_x, grad_gate = x.new_empty(x.shape), x if gate is None else gate.new_empty(gate.shape)
    grad = grad.contiguous()
    if x.numel():
        drop = drop or dropout_words(None, 0.0, 0, x)
        tile, other = row_tile(width, target_of(x)), x if gate is None else gate
        residual = x if residual_grad is None else residual_grad
        kernel("row_passes", "normalize_rows_backward")[(_ceil(num_rows, tile.block_q),)](
            *(grad, x, other, residual, drop.key_words, moments, grad_x, grad_gate, grad, num_rows, width),
            *(x.stride(0), other.stride(0), residual.stride(0), *drop[1:5]),
            NORM=norm,
            GATED=gate is not None,
            DROPOUT=drop.is_given,
            RESIDUAL=residual_grad is not None,
            **_sizes(tile),
        )
    return NormGradients(grad_x, grad_gate, grad)


def empty_moments(x: Tensor, norm: str) -> Tensor:
    """Room for mean and inverse deviation of every row; none without a norm."""
    return x.new_empty(2, 0 if norm == "none" else x.shape[0], dtype=torch.float32)


def check_width(width: int) -> None:
    """Refuse rows that no program has room for."""
    if width > MAX_WIDTH:
        raise ValueError(
            f"rows have {width} numbers; Triton's kernels take up to {MAX_WIDTH}: use train.backend=reference"
        )


def activate(x: Tensor, bias: Tensor | None, out: Tensor, *, silu: bool, residual: Tensor | None = None) -> None:
    """Write residual + SiLU(x + bias) to `out`; x may be columns of a wider tensor."""
    if x.numel():
        tile, other = element_tile(x.shape[1]), x if residual is None else residual
        kernel("row_passes", "activate")[_element_grid(x, tile)](
            *(x, x if bias is None else bias, other, out, *x.shape, x.stride(0), other.stride(0)),
            SILU=silu,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            **_sizes(tile),
        )


def activate_backward(grad: Tensor, x: Tensor, bias: Tensor | None, out: Tensor, *, silu: bool) -> None:
    """Write grad * SiLU'(x + bias) to `out`; x and out may be columns of wider tensors."""
    if grad.numel():
        tile = element_tile(grad.shape[1])
        kernel("row_passes", "activate_backward")[_element_grid(grad, tile)](
            *(grad, x, x if bias is None else bias, out, *grad.shape, grad.stride(0), x.stride(0), out.stride(0)),
            SILU=silu,
            BIAS=bias is not None,
            **_sizes(tile),
        )


def gate_by_silu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    out = gate.new_empty(gate.shape)
    if gate.numel():
        tile = element_tile(gate.shape[1])
        kernel("row_passes", "gate_by_silu")[_element_grid(gate, tile)](gate, up, out, *gate.shape, **_sizes(tile))
    return out


def gate_by_silu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both factors, and what `gate_by_silu` had returned, in the memory of `grad`."""
    grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        tile = element_tile(gate.shape[1])
        kernel("row_passes", "gate_by_silu_backward")[_element_grid(gate, tile)](
            grad, gate, up, grad_gate, grad_up, grad, *gate.shape, **_sizes(tile)
        )
    return grad_gate, grad_up, grad


def drop_elements(x: Tensor, drop: DropoutWords) -> Tensor:
    """x with elements dropped and the kept ones scaled."""
    out = x.new_empty(x.shape)
    if x.numel():
        tile = element_tile(x.shape[1])
        kernel("row_passes", "drop_elements")[_element_grid(x, tile)](
            x, drop.key_words, out, *x.shape, x.stride(0), *drop[1:5], **_sizes(tile)
        )
    return out


class Segments(NamedTuple):
    """The places that use each row: `order` [n] int32 sorted by row, `bounds` [rows + 1] int32."""

    order: Tensor
    bounds: Tensor


def sort_by_row(index: Tensor, num_rows: int) -> Segments:
    """Sort the places of an index by their rows, equal ones in their order, without asking the device for anything."""
    rows, order = torch.sort(index, stable=True)
    bounds = torch.searchsorted(rows, torch.arange(num_rows + 1, dtype=rows.dtype, device=rows.device))
    return Segments(order.int(), bounds.int())


def sum_duplicates(
    grad: Tensor, index: Tensor, num_rows: int, scale: float = 1.0, drop: DropoutWords | None = None
) -> Tensor:
    """[num_rows, d]: scale times the sum of dropout(grad) over the places of each row."""
    width = grad.shape[1]
    out = grad.new_empty(num_rows, width)
    if out.numel():
        segments, tile = sort_by_row(index, num_rows), segment_tile(width)
        drop = drop or dropout_words(None, 0.0, 0, grad)
        kernel("table_rows", "sum_duplicates")[(num_rows, _ceil(width, tile.block_k))](
            *(grad, *segments, drop.key_words, out, width, grad.stride(0), scale, *drop[1:5]),
            STEP=tile.block_q,
            BLOCK=tile.block_k,
            DROPOUT=drop.is_given,
            INTERPRETED=is_interpreting(),
            **tile.options(),
        )
    return out


def look_up(
    rows: Tensor,
    index: Tensor,
    position_rows: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    drop: DropoutWords | None = None,
) -> Tensor:
    """rows[index]; with positions dropout(rows[index] * scale + position_rows[positions])."""
    width = rows.shape[1]
    rows, index = rows.contiguous(), index.contiguous()
    out = rows.new_empty(index.numel(), width)
    if out.numel():
        tile = element_tile(width)
        drop = drop or dropout_words(None, 0.0, 0, rows)
        kernel("table_rows", "look_up")[_element_grid(out, tile)](
            *(rows, index, rows if position_rows is None else position_rows.contiguous()),
            *(index if positions is None else positions.contiguous(), drop.key_words, out, *out.shape, scale),
            *drop[1:5],
            EMBED=positions is not None,
            DROPOUT=drop.is_given,
            **_sizes(tile),
        )
    return out


def weight_like(weight: Tensor, x: Tensor) -> Tensor:
    """A matrix of parameters in the type of the activations."""
    return weight.to(x.dtype)


def weight_gradient(left: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """leftᵀ @ grad, summed in fp32 and not rounded below the weight's type."""
    if left.dtype == weight.dtype:
        return left.T @ grad
    if left.device.type == "cuda" and torch.version.hip is None:
        return torch.mm(left.T, grad, out_dtype=weight.dtype)
    return left.T.to(weight.dtype) @ grad.to(weight.dtype)


def column_sums(grad: Tensor, like: Tensor) -> Tensor:
    """Gradient of a bias."""
    return grad.sum(0, dtype=like.dtype)


def _sizes(tile: Tile) -> dict[str, Any]:
    return {"ROWS": tile.block_q, "BLOCK": tile.block_k, "INTERPRETED": is_interpreting(), **tile.options()}


def _element_grid(x: Tensor, tile: Tile) -> tuple[int, int]:
    return _ceil(x.shape[0], tile.block_q), _ceil(x.shape[1], tile.block_k)


def _ceil(size: int, block: int) -> int:
    return -(-size // block)
