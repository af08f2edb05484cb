"""Rows sent between ranks in half the bytes: fp16 or bf16 with a scale per row, so that nothing over- or underflows.

A row is scaled by the power of two that brings its largest element into [0.5, 1), and the exponent is sent as one more
column. Rounding is then relative to the row: at most 2**-11 of its largest element in fp16 and 2**-8 in bf16, for
gradients of any size; one scale for the whole loss would have to be guessed. Infinity and NaN are preserved.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "fp16", "bf16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST_EXPONENT = 126  # 2**126 and 2**-126 are normal fp32 numbers, and fp16 and bf16 represent 126 exactly


def encode(rows: Tensor, precision: Precision) -> Tensor:
    """Return the message for `rows` [n, d]: the rows themselves for fp32, else [n, d + 1] in half precision."""
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
    """Return the rows [n, d] fp32 of a message made by `encode`."""
    if precision == "fp32":
        return message
    exponents = message[:, -1:].to(torch.float32).to(torch.int32)
    return message[:, :-1].to(torch.float32).mul_(_powers(exponents))


def _powers(exponents: Tensor) -> Tensor:
    """Return 2 ** exponents [n, 1] in fp32; multiplying by this column is exact and much faster than ldexp."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents)


def empty_message(num_rows: int, width: int, precision: Precision, device: torch.device) -> Tensor:
    """Return an empty buffer for a message of `num_rows` rows of `width` elements."""

    columns = width if precision == "fp32" else width + 1
    return torch.empty(num_rows, columns, dtype=DTYPES[precision], device=device)
