"""Checks that operators share.

An operator checks shapes and types before it chooses a backend. Values (offsets, indices) are checked by the backends
themselves, because only they see real values in a graph that torch.compile has made. That is done on the CPU only:
reading a device tensor would wait for all its pending work, and batches are checked before they are copied there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Require a shape in which None stands for any size."""
    if tensor.dim() != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def check_filled(name: str, tensor: Tensor, *dims: int) -> None:
    """Require at least one element along these dimensions."""
    for dim in dims:
        if tensor.shape[dim] == 0:
            raise ValueError(f"{name} must not be empty along dimension {dim}, got shape {tuple(tensor.shape)}")


def check_dtypes(dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Require one floating type of all tensors: `dtype`, that of the operator's first argument."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} like the other tensors, got {tensor.dtype}; convert it first")


def check_parameters(dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Require the type of the activations, or fp32 beside bf16 activations (`precision.py`)."""
    for name, tensor in tensors.items():
        if tensor is None or (dtype == torch.bfloat16 and tensor.dtype == torch.float32):
            continue
        check_dtypes(dtype, **{name: tensor})


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Require one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_keys(keys: Tensor | None, num_rows: int) -> None:
    """Require keys [num_rows] int64, which dropout needs."""
    if keys is None:
        raise ValueError("dropout needs the keys of the rows: int64, one a row")
    check_shape("keys", keys, (num_rows,))
    if keys.dtype != torch.int64:
        raise ValueError(f"keys must be int64, got {keys.dtype}")


def check_offsets(offsets: Tensor, num_values: int, max_len: int | None = None, *, filled: bool = False) -> None:
    """Require offsets [B + 1] int64 that run from 0 to `num_values`, never decrease, and are at most `max_len` apart.

    With `filled`, no sequence may be empty.
    """
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(
            f"offsets must be a non-empty int64 vector, got {offsets.dtype} of shape {tuple(offsets.shape)}"
        )
    if not is_readable(offsets):
        return
    if offsets[0] != 0 or offsets[-1] != num_values:
        raise ValueError(
            f"offsets must run from 0 to the {num_values} values, got {int(offsets[0])} to {int(offsets[-1])}"
        )
    if offsets.numel() > 1:
        lengths = offsets.diff()
        if lengths.min() < 0:
            at = int((lengths < 0).nonzero()[0])
            raise ValueError(
                f"offsets must not decrease, got {int(offsets[at])} then {int(offsets[at + 1])} at position {at}"
            )
        if filled and lengths.min() < 1:
            raise ValueError(f"offsets leave sequence {int(lengths.argmin())} empty; each must hold at least one value")
        if max_len is not None and lengths.max() > max_len:
            raise ValueError(f"a sequence of {int(lengths.max())} is longer than max_len {max_len}")


def check_index(name: str, index: Tensor, bound: int) -> None:
    """Require an integer tensor with values in [0, bound)."""
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {index.dtype}")
    if not is_readable(index) or index.numel() == 0:
        return
    low, high = torch.aminmax(index)
    if low < 0 or high >= bound:
        wrong = int(low) if low < 0 else int(high)
        place = tuple((index == wrong).nonzero()[0].tolist())
        raise ValueError(f"{name} holds {wrong} at {place}, outside 0 to {bound - 1}")


def is_readable(tensor: Tensor) -> bool:
    """Whether a check may look at the tensor's values: it is on the CPU and not traced by torch.compile."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not isinstance(tensor, FakeTensor) and not torch._is_functional_tensor(tensor)
