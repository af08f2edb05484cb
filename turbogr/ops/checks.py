"""Checks that operators share: what a backend may rely on without looking again.

They run on the CPU only where they read values: a look at a device tensor would stall its queue, and batches are
checked before they move.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Require a shape in which None stands for any size."""
    if tensor.dim() != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def check_offsets(offsets: Tensor, num_values: int, max_len: int | None = None) -> None:
    """Require offsets [B + 1] int64 that run from 0 to `num_values`, never decrease, and keep rows within `max_len`."""
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(
            f"offsets must be a non-empty int64 vector, got {offsets.dtype} of shape {tuple(offsets.shape)}"
        )
    if not _readable(offsets):
        return
    if offsets[0] != 0 or offsets[-1] != num_values:
        raise ValueError(
            f"offsets must run from 0 to the {num_values} values, got {int(offsets[0])} to {int(offsets[-1])}"
        )
    if offsets.numel() > 1:
        lengths = offsets.diff()
        if lengths.min() < 0:
            raise ValueError("offsets must not decrease")
        if max_len is not None and lengths.max() > max_len:
            raise ValueError(f"a sequence of {int(lengths.max())} is longer than max_len {max_len}")


def check_index(name: str, index: Tensor, bound: int) -> None:
    """Require an integer tensor with values in [0, bound)."""
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {index.dtype}")
    if not _readable(index) or index.numel() == 0:
        return
    low, high = torch.aminmax(index)
    if low < 0 or high >= bound:
        raise ValueError(f"{name} holds {int(low) if low < 0 else int(high)}, outside 0 to {bound - 1}")


def _readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_fake(tensor)


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter)
