"""Where Triton's backend runs, and in which precision its kernels multiply.

Triton is optional: torch for CUDA and ROCm brings it along, other installs get it with the extra `triton`. On a CPU its
kernels run in Triton's interpreter only, which is for tests: it must be asked for by name and by TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.registry import Backend

DEVICES = "CPU CUDA"
"""Dispatch keys of the operators; ROCm's is CUDA too."""

_NOT_INSTALLED = "Triton is not installed; install it with pip install 'turbogr[triton]' (Linux)"
NOT_INTERPRETING = "on a CPU it runs in Triton's interpreter only, which is slow: set TRITON_INTERPRET=1 for tests"


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@dataclass(frozen=True)
class TritonBackend(Backend):
    """Serves a CPU only in the interpreter, and there only when it is chosen by name."""

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """See `Backend`."""
        if device.type == "cpu" and not is_interpreting():
            return NOT_INTERPRETING
        return super().why_not(device, dtype)


BACKEND = TritonBackend(
    "triton",
    devices=("cuda", "cpu"),
    dtypes=(torch.float32, torch.bfloat16),
    problem=None if importlib.util.find_spec("triton") else _NOT_INSTALLED,
    by_name_only_on=("cpu",),
)
"""The `BACKEND` of a module with functions on Triton kernels."""

HOST_TOO_BACKEND = replace(BACKEND, or_auto_on=("cpu",))
"""The same for what the host computes too beside a device: draws of negatives, and tables in host memory."""


@lru_cache
def kernel(module: str, name: str) -> Any:
    """A kernel of `turbogr.ops.triton_kernels`, imported when it is first launched."""
    return getattr(import_module(f"turbogr.ops.triton_kernels.{module}"), name)


def precision_of(x: Tensor) -> str:
    """Precision of a product of tensors like `x`: bf16, or for fp32 what `torch.set_float32_matmul_precision` says."""
    if x.dtype == torch.bfloat16:
        return "bf16"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def target_of(x: Tensor) -> str:
    """The kind of device: cuda, hip, or interpreter."""
    if x.device.type == "cpu":
        return "interpreter"
    return "cuda" if torch.version.hip is None else "hip"
