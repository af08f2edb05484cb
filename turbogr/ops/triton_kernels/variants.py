"""Every variant of every kernel that is compiled and checked without a device.

A kernel joins by a function that lists its variants, under `@variants_of("name")`. A variant says how the kernel is
called: the types of its arguments and its constants, with the tile that a launch would use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from turbogr.ops.triton_kernels.launching import Tile, attention_tile, channel_tile, diagonal_tile, input_precision

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
    return list(_listed)


def list_variants(device: str, kernels: list[str] | None = None) -> list[Variant]:
    """All variants for a kind of device, `cuda` or `hip`."""
    return [variant for name in kernels or kernel_names() for variant in _listed[name](device)]


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


_PRODUCTS = {"attention_forward": 2, "attention_backward_keys": 4, "attention_backward_rows": 3}


def _attention(kernel: str, device: str) -> Iterator[Variant]:
    cases = [(mask, bias) for mask in ("causal", "ranges") for bias in ("bias", "nobias", "softmax")]
    for head in HEADS:
        for precision in PRECISIONS:
            for mask, bias in cases:
                tile = attention_tile(kernel, precision, head, device)
                constants = {
                    "D": head,
                    "E": head,
                    "BLOCK_D": head,
                    "BLOCK_E": head,
                    "BLOCK_Q": tile.block_q,
                    "BLOCK_K": tile.block_k,
                    "SOFTMAX": bias == "softmax",
                    "BIAS": bias == "bias",
                    "RANGES": mask == "ranges",
                    **_product_constants(precision, device),
                    "TANH": precision == "bf16" and device == "cuda",
                }
                pairs = tile.block_q * tile.block_k
                moving = tile.block_q if kernel.endswith("keys") else tile.block_k
                yield Variant(
                    kernel, "attention", kernel, head, precision, mask, bias, constants, tile, pairs,
                    flops=_PRODUCTS[kernel] * 2 * pairs * head,
                    bytes=2 * moving * head * _size(precision),
                )  # fmt: skip


def _product_constants(precision: str, device: str) -> dict[str, Any]:
    return {"PRECISION": input_precision(precision, device), "INTERPRETED": False}


def _size(precision: str) -> int:
    return 2 if precision == "bf16" else 4


@variants_of("attention_forward")
def _forward(device: str) -> Iterator[Variant]:
    return _attention("attention_forward", device)


@variants_of("attention_backward_keys")
def _backward_keys(device: str) -> Iterator[Variant]:
    return _attention("attention_backward_keys", device)


@variants_of("attention_backward_rows")
def _backward_rows(device: str) -> Iterator[Variant]:
    return _attention("attention_backward_rows", device)


@variants_of("bias_gradients")
def _bias_gradients(device: str) -> Iterator[Variant]:
    for head in HEADS:
        for precision in PRECISIONS:
            for mask in ("causal", "ranges"):
                tile = diagonal_tile("bias_gradients", precision, head, device)
                constants = {
                    "D": head,
                    "E": head,
                    "BLOCK_D": head,
                    "BLOCK_E": head,
                    "BLOCK": tile.block_q,
                    "WEIGHTS": 256,
                    "RANGES": mask == "ranges",
                    **_product_constants(precision, device),
                    "TANH": precision == "bf16" and device == "cuda",
                }
                pairs = tile.block_q * tile.block_k
                yield Variant(
                    "bias_gradients", "relative_weights", "bias_gradients", head, precision, mask, "bias", constants,
                    tile, pairs, flops=4 * pairs * head, bytes=4 * tile.block_q * head * _size(precision),
                )  # fmt: skip


@variants_of("bucket_plan")
def _bucket_plan(device: str) -> Iterator[Variant]:
    tile = attention_tile("attention_forward", "fp32", 64, device)
    constants = {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "TILES": 16}
    yield Variant("bucket_plan", "relative_weights", "bucket_plan", 0, "", "", "", constants, tile)


def _channels(kernel: str, device: str) -> Iterator[Variant]:
    is_pass_over_diagonals = kernel == "channel_weight_gradients"
    products = {"channels_forward": 2, "channels_backward_values": 2, "channel_weight_gradients": 2}[kernel]
    tile_of = diagonal_tile if is_pass_over_diagonals else channel_tile
    for chunk in (16, 32, 64):
        for precision in PRECISIONS:
            tile = tile_of(kernel, precision, chunk, device)
            for mask in ("causal", "ranges"):
                for time in ("buckets", "decay"):
                    constants: dict[str, Any] = {"E": chunk, "CHUNK": chunk, "DECAY": time == "decay"}
                    constants |= {"RANGES": mask == "ranges", **_product_constants(precision, device)}
                    if is_pass_over_diagonals:
                        constants |= {"BLOCK": tile.block_q, "WEIGHTS": 16 if time == "decay" else 256}
                    else:
                        constants |= {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k}
                    if kernel == "channels_backward_values":
                        constants["ADD"] = True
                    pairs = tile.block_q * tile.block_k
                    yield Variant(
                        kernel, "channels", kernel, chunk, precision, mask, time, constants, tile, pairs,
                        flops=products * 2 * pairs * chunk,
                        bytes=2 * tile.block_k * chunk * _size(precision),
                        types={"grad_v": "*fp32"},
                    )  # fmt: skip


@variants_of("channels_forward")
def _channels_forward(device: str) -> Iterator[Variant]:
    return _channels("channels_forward", device)


@variants_of("channels_backward_values")
def _channels_backward_values(device: str) -> Iterator[Variant]:
    return _channels("channels_backward_values", device)


@variants_of("channel_weight_gradients")
def _channel_weight_gradients(device: str) -> Iterator[Variant]:
    return _channels("channel_weight_gradients", device)
