"""Every variant of every kernel that is compiled and checked without a device.

A kernel joins by a function that lists its variants, under `@variants_of("name")`. A variant says how the kernel is
called: the types of its arguments and its constants, with the tile that a launch would use. The lists are in the
modules of `_LISTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from turbogr.ops.triton_kernels.launching import Tile, input_precision

_LISTS = ("attention_variants", "row_variants", "loss_variants")

HEADS = (16, 32, 64, 128)
PRECISIONS = ("fp32", "tf32", "bf16")

_INT64 = ("offsets", "first", "last", "query_times", "key_times", "bin_boundaries")
_INT32 = ("tile_sequence", "first_tile", "first_row_tile", "bin_buckets", "plan")
_FLOAT32 = ("log_sums", "deltas", "position_sums", "time_sums")
_NUMBERS = (
    "max_len",
    "plan_width",
    "width",
    "num_sequences",
    "num_heads",
    "num_splits",
    "num_diagonals",
    "first_weight",
)


@dataclass(frozen=True)
class Variant:
    """A kernel with constants, as it is launched on one kind of device (`cuda` or `hip`).

    `pairs` is how many pairs of a query and a key a pass of the inner loop sees, `flops` its floating-point operations
    in matrix products, `bytes` what it reads; 0 for kernels without products.
    """

    kernel: str
    module: str
    function: str
    head: int
    precision: str
    mask: str
    bias: str
    constants: dict[str, Any]
    tile: Tile
    pairs: int = 0
    flops: int = 0
    bytes: int = 0
    types: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in tables: the kernel and what distinguishes the variant."""
        parts = (self.kernel, f"d{self.head}" if self.head else "", self.precision, self.mask, self.bias)
        return "_".join(part for part in parts if part)

    @property
    def has_products(self) -> bool:
        """Whether the kernel multiplies matrices."""
        return self.flops > 0

    def argument_type(self, name: str) -> str:
        """Triton's type of an argument."""
        return self.types.get(name) or _argument_type(name, "bf16" if self.precision == "bf16" else "fp32")


_listed: dict[str, Callable[[str], Iterator[Variant]]] = {}


def variants_of(kernel: str) -> Callable[[Callable[[str], Iterator[Variant]]], Callable[[str], Iterator[Variant]]]:
    """Register a function that lists the variants of a kernel for a kind of device."""

    def register(function: Callable[[str], Iterator[Variant]]) -> Callable[[str], Iterator[Variant]]:
        _listed[kernel] = function
        return function

    return register


def kernel_names() -> list[str]:
    """The kernels that have variants."""
    for name in _LISTS:
        import_module(f"turbogr.ops.triton_kernels.{name}")
    return list(_listed)


def list_variants(device: str, kernels: list[str] | None = None) -> list[Variant]:
    """All variants for a kind of device, `cuda` or `hip`."""
    known = kernel_names()
    return [variant for name in kernels or known for variant in _listed[name](device)]


def _argument_type(name: str, floating: str) -> str:
    if name in _INT64:
        return "*i64"
    if name in _INT32:
        return "*i32"
    if name in _FLOAT32:
        return "*fp32"
    if name in _NUMBERS or name.endswith(("_token", "_head")):
        return "i32"
    if name in ("alpha", "scale"):
        return "fp32"
    return f"*{floating}"


def product_constants(precision: str, device: str) -> dict[str, Any]:
    """Constants of a kernel with products."""
    return {"PRECISION": input_precision(precision, device), "INTERPRETED": False}


def size_of(precision: str) -> int:
    """Bytes of a number."""
    return 2 if precision == "bf16" else 4
