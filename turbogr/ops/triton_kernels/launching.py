"""Tiles and options of every launch: the same for a launch on a device and for the check that compiles without one.

Sizes follow from the head size, the precision and the kind of device: small enough for registers and for the shared
memory of the smallest device of its kind (`turbogr bench kernels` shows both), never below 32 x 64 for attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and how many tiles its loads run ahead.

    `chunk` is how many columns of a head the products that make scores take at once, 0 for all. Then only those are in
    registers, and they are loaded again for every tile.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    chunk: int = 0

    def options(self) -> dict[str, int]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


MAX_BLOCK = 256
"""The largest head."""


def padded(size: int) -> int:
    """The power of two, at least 16, that a head is padded to; matrix units take no smaller one."""
    return max(16, 1 << (size - 1).bit_length())


def input_precision(precision: str, target: str) -> str:
    """The precision for `tl.dot`: on NVIDIA fp32 is three products in TF32, nearly as exact, on the matrix units."""
    if precision == "tf32" and target != "interpreter":
        return "tf32"
    return "tf32x3" if precision == "fp32" and target == "cuda" else "ieee"


def attention_tile(kernel: str, precision: str, block: int, target: str, *, bias: bool = False) -> Tile:
    """Tile of a kernel of attention for heads of `block` (the larger one, if q and v differ).

    A program owns 64 rows, 16 for each of 4 warps, or 64 keys, and takes the others in steps. Scores are made in
    chunks of the head's columns where a program's own operands would not leave registers for the rest.
    """
    own, step = (32, 32) if target == "interpreter" else (64, 32)
    block_q, block_k = (step, own) if kernel.endswith(("_keys", "_values")) else (own, step)
    if target == "interpreter":
        return Tile(block_q, block_k, 4, 1, 16 if block > 16 else 0)
    if target == "hip":
        return Tile(block_q, block_k, 4, 1, 32 if precision == "fp32" and block >= 128 else 0)
    is_wide = block >= (32 if precision == "fp32" else 64)
    in_chunks = is_wide and (bias or precision != "bf16" or block >= 128)
    if precision == "bf16" and kernel == "attention_forward":
        in_chunks = False
    return Tile(block_q, block_k, 8, 1, 32) if in_chunks else Tile(block_q, block_k, 4, 2)


class TileMap(NamedTuple):
    """Which sequence each program's tile belongs to, -1 for none, and the number of each sequence's first tile."""

    tile_sequence: Tensor
    first_tile: Tensor


def map_tiles(offsets: Tensor, num_tokens: int, block: int) -> TileMap:
    """Cut every sequence into tiles of `block`, without asking the device for lengths: some of the tiles are none."""
    num_sequences = offsets.numel() - 1
    counts = (offsets.diff() + (block - 1)) // block
    first = torch.zeros(num_sequences + 1, dtype=torch.int64, device=offsets.device)
    torch.cumsum(counts, 0, out=first[1:])
    tiles = torch.arange(num_tokens // block + num_sequences, device=offsets.device)
    sequence = torch.searchsorted(first[1:], tiles, right=True)
    return TileMap(torch.where(sequence < num_sequences, sequence, -1).int(), first.int())


def diagonal_tile(kernel: str, precision: str, block: int, target: str) -> Tile:
    """Square tile of a pass over diagonals (`relative_weights.py`); `block` is the head's, or the chunk of columns."""
    if target == "interpreter":
        return Tile(32, 32, 4, 1, 16)
    chunk = min(block, 16 if precision == "fp32" else 32)
    return Tile(64, 64, 8, 2 if target == "cuda" and precision == "bf16" else 1, chunk)


def chunk_of(width: int) -> int:
    """How many of the columns of all heads' values a program of FuXi's channels takes."""
    return min(64, padded(width))


def channel_tile(kernel: str, precision: str, block: int, target: str) -> Tile:
    """Tile of FuXi's channels of position and time for chunks of `block` columns."""
    return attention_tile(kernel, precision, block, target)._replace(chunk=0)


MAX_WIDTH = 8192
"""The widest row that a norm takes: a program has whole rows."""


def row_tile(width: int, target: str) -> Tile:
    """Tile of a pass with whole rows: `block_q` rows of `block_k` columns, at most 8 numbers for each thread.

    A program has at most 1,024 threads: 32 warps of NVIDIA, 16 of AMD.
    """
    block = padded(width)
    rows = max(1, 1024 // block)
    threads = 64 if target == "hip" else 32
    return Tile(rows, block, min(1024 // threads, max(1, rows * block // (8 * threads))), 1)


def element_tile(width: int) -> Tile:
    """Tile of a pass element by element: `block_q` rows of `block_k` columns, 8 numbers for each thread."""
    block = min(256, padded(width))
    return Tile(1024 // block, block, 4, 1)


def segment_tile(width: int) -> Tile:
    """Tile of a sum over the places of a row: `block_q` places of `block_k` columns are read at once."""
    block = min(256, padded(width))
    return Tile(8, block, max(1, block // 64), 1)


def candidate_tile(width: int) -> Tile:
    """Tile of a position's candidates: `block_q` whole rows of `block_k` columns, 32 numbers for each thread."""
    block = padded(width)
    step = max(1, min(32, 4096 // block))
    return Tile(step, block, max(1, min(8, step * block // 1024)), 1)


def score_tile(precision: str, target: str, *, backward_rows: bool = False) -> Tile:
    """Tile of scores that groups share: positions, candidates. A program owns 64 of one kind."""
    own, step = (16, 16) if target == "interpreter" else (64, 32)
    warps = 8 if target == "cuda" and precision == "fp32" else 4
    return Tile(step, own, warps, 1) if backward_rows else Tile(own, step, warps, 1)


def score_chunks(width: int) -> tuple[int, int]:
    """How many columns of vectors are multiplied at once, and of how many a program makes the gradient."""
    return min(32, padded(width)), min(64, padded(width))
