"""Variants of the passes over rows: `row_passes.py`, `random_bits.py` and `table_rows.py`, in every launched tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from turbogr.ops.triton_kernels.launching import Tile, element_tile, row_tile, segment_tile
from turbogr.ops.triton_kernels.variants import Variant, variants_of

_ROW_WIDTHS = (64, 256, 1024, 8192)  # of whole rows: the last is the widest, with the most warps
_WORDS = dict.fromkeys(("num_rows", "num_tokens", "num_columns", "width", "bound"), "i32")
_WORDS |= dict.fromkeys(("seed_low", "seed_high", "threshold"), "i32") | {"keep_scale": "fp32", "eps": "fp32"}
_WORDS |= {"key_words": "*i32", "order": "*i32", "bounds": "*i32", "index": "*i64", "positions": "*i64"}
_WORDS |= {"moments": "*fp32", "bias": "*fp32"}
_RATES = ("mean_share", "beta2", "square_share", "decay", "step_size", "inverse_root_correction", "lr")
_WORDS |= dict.fromkeys(_RATES, "fp32")


def _rows(
    function: str,
    module: str,
    tile: Tile,
    name: str,
    constants: dict[str, Any],
    precisions: tuple[str, ...] = ("fp32", "bf16"),
) -> Iterator[Variant]:
    """A pass over rows, without products; `name` says what distinguishes its constants."""
    step = "STEP" if module == "table_rows" and function != "look_up" else "ROWS"
    for precision in precisions:
        sizes = {step: tile.block_q, "BLOCK": tile.block_k}
        kernel = f"{function}_of_{tile.block_k}"
        yield Variant(
            kernel, module, function, 0, precision, name, "", {**constants, **sizes}, tile, types=_WORDS
        )  # fmt: skip


@variants_of("normalize_rows")
def _normalize_rows(device: str) -> Iterator[Variant]:
    for width in _ROW_WIDTHS:
        for name, norm, gated, dropout in (
            ("layer", "layer", False, False),
            ("rms_dropout", "rms", False, True),
            ("layer_gate_dropout", "layer", True, True),
        ):
            constants = {"NORM": norm, "GATED": gated, "DROPOUT": dropout, "INTERPRETED": False}
            tile = row_tile(width, device)
            yield from _rows("normalize_rows", "row_passes", tile, name, constants)
            constants["RESIDUAL"] = not gated
            yield from _rows("normalize_rows_backward", "row_passes", tile, name, constants)


@variants_of("activate")
def _activate(device: str) -> Iterator[Variant]:
    tile, constants = element_tile(256), {"INTERPRETED": False, "BIAS": True}
    yield from _rows("activate", "row_passes", tile, "silu", {**constants, "SILU": True, "RESIDUAL": False})
    yield from _rows("activate", "row_passes", tile, "residual", {**constants, "SILU": False, "RESIDUAL": True})
    yield from _rows("activate_backward", "row_passes", tile, "silu", {**constants, "SILU": True})
    yield from _rows("activate_backward", "row_passes", tile, "copy", {**constants, "SILU": False})


@variants_of("gate_by_silu")
def _gate_by_silu(device: str) -> Iterator[Variant]:
    for function in ("gate_by_silu", "gate_by_silu_backward"):
        yield from _rows(function, "row_passes", element_tile(256), "", {"INTERPRETED": False})


@variants_of("drop_elements")
def _drop_elements(device: str) -> Iterator[Variant]:
    yield from _rows("drop_elements", "row_passes", element_tile(256), "", {"INTERPRETED": False})


@variants_of("random_integers")
def _random_integers(device: str) -> Iterator[Variant]:
    for variant in _rows("random_integers", "random_bits", element_tile(128), "", {}, ("",)):
        yield replace(variant, types={**_WORDS, "out": "*i32"})


@variants_of("look_up")
def _look_up(device: str) -> Iterator[Variant]:
    for name, embeds in (("rows", False), ("embed_dropout", True)):
        constants = {"EMBED": embeds, "DROPOUT": embeds, "INTERPRETED": False}
        yield from _rows("look_up", "table_rows", element_tile(256), name, constants, ("fp32",))


@variants_of("sum_duplicates")
def _sum_duplicates(device: str) -> Iterator[Variant]:
    for width in (64, 256):
        for name, dropout in (("plain", False), ("dropout", True)):
            constants = {"DROPOUT": dropout, "INTERPRETED": False}
            yield from _rows("sum_duplicates", "table_rows", segment_tile(width), name, constants, ("fp32",))


@variants_of("row_updates")
def _row_updates(device: str) -> Iterator[Variant]:
    for function in ("row_adam", "row_adagrad"):
        for width in (64, 256):
            for name, summed in (("summed", True), ("duplicates", False)):
                yield from _rows(function, "table_rows", segment_tile(width), name, {"SUMMED": summed}, ("fp32",))
