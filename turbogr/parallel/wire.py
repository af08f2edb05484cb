"""Vectors in half the bytes on the way: fp16 or bf16 with a power of two per row, so that nothing over- or underflows.

A row is scaled by the power of two that brings its largest element into [0.5, 1), and the exponent travels as one more
column. Rounding is then relative to the row: at most 2**-11 of its largest element in fp16 and 2**-8 in bf16, however
small gradients are; a scale for the whole loss would have to be guessed. Infinity and NaN arrive as such.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "fp16", "bf16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST_EXPONENT = 126  # both powers of two are normal fp32 numbers, and both half formats hold it exactly


def encode(rows: Tensor, precision: Precision) -> Tensor:
    """Return `rows` [n, d] as they travel: themselves for fp32, else [n, d + 1] in half precision."""
    if precision == "fp32":
        return rows.contiguous()
    message = rows.new_empty(rows.shape[0], rows.shape[1] + 1, dtype=DTYPES[precision])
    if rows.numel():
        largest = rows.abs().amax(1, keepdim=True)
        _, exponents = torch.frexp(torch.where(largest.isfinite(), largest, torch.zeros_like(largest)))
        exponents = exponents.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        message[:, :-1] = rows * _powers(-exponents)
        message[:, -1:] = exponents.to(message.dtype)
    return message


def decode(message: Tensor, precision: Precision) -> Tensor:
    """Return the rows [n, d] fp32 of a message of `encode`."""
    if precision == "fp32":
        return message
    exponents = message[:, -1:].to(torch.float32).to(torch.int32)
    return message[:, :-1].to(torch.float32).mul_(_powers(exponents))


def _powers(exponents: Tensor) -> Tensor:
    """Return 2 ** exponents [n, 1] in fp32; multiplying by a column of them is exact and much quicker than ldexp."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents)


def message_like(num_rows: int, width: int, precision: Precision, device: torch.device) -> Tensor:
    """Return room for a message of `num_rows` rows of `width`."""
    columns = width if precision == "fp32" else width + 1
    return torch.empty(num_rows, columns, dtype=DTYPES[precision], device=device)
