"""Every variant of attention's kernels that is compiled without a device; see `variants.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turbogr.ops.triton_kernels.launching import attention_tile, channel_tile, diagonal_tile
from turbogr.ops.triton_kernels.variants import HEADS, PRECISIONS, Variant, product_constants, size_of, variants_of

_PRODUCTS = {"attention_forward": 2, "attention_backward_keys": 4, "attention_backward_rows": 3}


def _attention(kernel: str, device: str) -> Iterator[Variant]:
    cases = [(mask, bias) for mask in ("causal", "ranges") for bias in ("bias", "nobias", "softmax")]
    for head in HEADS:
        for precision in PRECISIONS:
            for mask, bias in cases:
                tile = attention_tile(kernel, precision, head, device, bias=bias == "bias")
                constants = {
                    "D": head,
                    "E": head,
                    "BLOCK_D": head,
                    "BLOCK_E": head,
                    "BLOCK_Q": tile.block_q,
                    "BLOCK_K": tile.block_k,
                    "CHUNK": tile.chunk,
                    "SOFTMAX": bias == "softmax",
                    "BIAS": bias == "bias",
                    "RANGES": mask == "ranges",
                    **product_constants(precision, device),
                    "TANH": precision == "bf16" and device == "cuda",
                }
                pairs = tile.block_q * tile.block_k
                moving = tile.block_q if kernel.endswith("keys") else tile.block_k
                yield Variant(
                    kernel, "attention", kernel, head, precision, mask, bias, constants, tile, pairs,
                    flops=_PRODUCTS[kernel] * 2 * pairs * head,
                    bytes=2 * moving * head * size_of(precision),
                )  # fmt: skip


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
                    "CHUNK": tile.chunk,
                    "WEIGHTS": 256,
                    "RANGES": mask == "ranges",
                    **product_constants(precision, device),
                    "TANH": precision == "bf16" and device == "cuda",
                }
                pairs = tile.block_q * tile.block_k
                yield Variant(
                    "bias_gradients", "relative_weights", "bias_gradients", head, precision, mask, "bias", constants,
                    tile, pairs, flops=4 * pairs * head, bytes=4 * tile.block_q * head * size_of(precision),
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
                    constants |= {"RANGES": mask == "ranges", **product_constants(precision, device)}
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
                        bytes=2 * tile.block_k * chunk * size_of(precision),
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
