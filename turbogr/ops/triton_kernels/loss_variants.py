"""Every variant of the losses' kernels that is compiled without a device; see `variants.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turbogr.ops.triton_kernels.launching import Tile, candidate_tile, row_tile, score_chunks, score_tile
from turbogr.ops.triton_kernels.variants import Variant, product_constants, variants_of

_WIDTHS = (64, 256, 1024)
_VECTORS = dict.fromkeys(("queries", "rows", "grad", "loss", "x"), "*fp32")
_INDICES = dict.fromkeys(("positives", "candidates", "offsets"), "*i64") | dict.fromkeys(("order", "bounds"), "*i32")
_FACTORS = dict.fromkeys(("log_q", "inverse_queries", "inverse_rows", "inverse_lengths", "row_scales"), "*fp32")
_OTHERS = dict.fromkeys(("scales", "log_sums", "out"), "*fp32") | {"inverse_temperature": "fp32"}
_COUNTS = dict.fromkeys(("num_rows", "num_positions", "num_candidates", "num_tiles", "width"), "i32")
_TYPES = _VECTORS | _INDICES | _FACTORS | _OTHERS | _COUNTS
_NARROW = {"fp32": "*fp32", "fp16": "*fp16", "int8": "*i8"}


def _types(candidates: str) -> dict[str, str]:
    return {**_TYPES, "narrow_rows": _NARROW[candidates], "narrowed": _NARROW[candidates]}


def _scoring(candidates: str) -> dict[str, Any]:
    return {"NORM": True, "SCALED": candidates != "fp16", "LOG_Q": True}


@variants_of("unit_rows")
def _unit_rows(device: str) -> Iterator[Variant]:
    for width in _WIDTHS:
        tile = row_tile(width, device)
        sizes = {"ROWS": tile.block_q, "BLOCK": tile.block_k}
        for candidates in _NARROW:
            constants = {**sizes, "NORM": True, "FORMAT": candidates}
            name = f"unit_rows_of_{width}"
            yield Variant(
                name, "candidate_scores", "unit_rows", 0, "", candidates, "", constants, tile, types=_types(candidates)
            )
        constants = {**sizes, "INTERPRETED": False}
        name = f"unit_rows_backward_of_{width}"
        yield Variant(name, "candidate_scores", "unit_rows_backward", 0, "", "", "", constants, tile, types=_TYPES)


def _own_candidates(function: str) -> Iterator[Variant]:
    for width in _WIDTHS:
        tile = candidate_tile(width)
        for candidates in (*_NARROW, "logits"):
            is_logits = candidates == "logits"
            constants = {"STEP": tile.block_q, "BLOCK": tile.block_k, "LOGITS": is_logits}
            constants |= {"NORM": True, "SCALED": True, "LOG_Q": False} if is_logits else _scoring(candidates)
            constants |= {"INTERPRETED": False} if function == "score_candidates" else {}
            types = _types("fp32" if is_logits else candidates)
            name = f"{function}_of_{width}"
            yield Variant(name, "candidate_scores", function, 0, "", candidates, "", constants, tile, types=types)


@variants_of("score_candidates")
def _score_candidates(device: str) -> Iterator[Variant]:
    return _own_candidates("score_candidates")


@variants_of("candidates_backward_queries")
def _candidates_backward_queries(device: str) -> Iterator[Variant]:
    return _own_candidates("candidates_backward_queries")


@variants_of("candidates_backward_rows")
def _candidates_backward_rows(device: str) -> Iterator[Variant]:
    return _own_candidates("candidates_backward_rows")


def _shared(function: str, device: str) -> Iterator[Variant]:
    chunk, out = score_chunks(1024)
    for precision in ("fp32", "tf32"):
        tile: Tile = score_tile(precision, device, backward_rows=function.endswith("_rows"))
        pairs = tile.block_q * tile.block_k
        for candidates in (*_NARROW, "all"):
            is_all = candidates == "all"
            constants = {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "CHUNK": chunk, "ALL": is_all}
            constants |= {"OUT": out} if "backward" in function else {}
            constants |= {"NORM": True, "SCALED": True, "LOG_Q": False} if is_all else _scoring(candidates)
            yield Variant(
                function, "shared_scores", function, 0, precision, candidates, "",
                {**constants, **product_constants(precision, device)}, tile, pairs,
                flops=2 * pairs * (chunk + (out if "backward" in function else 0)),
                types=_types("fp32" if is_all else candidates),
            )  # fmt: skip


@variants_of("shared_forward")
def _shared_forward(device: str) -> Iterator[Variant]:
    return _shared("shared_forward", device)


@variants_of("shared_backward_queries")
def _shared_backward_queries(device: str) -> Iterator[Variant]:
    return _shared("shared_backward_queries", device)


@variants_of("shared_backward_rows")
def _shared_backward_rows(device: str) -> Iterator[Variant]:
    return _shared("shared_backward_rows", device)
