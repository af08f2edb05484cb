"""What HSTU's and FuXi's relative biases need besides kernels: tables of bins, plans of buckets, sums of diagonals."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged_attention.reference import bucket_boundaries
from turbogr.ops.triton_kernels.launching import TileMap
from turbogr.ops.triton_runtime import kernel

NUM_BINS = 505  # 8 bins per power of two, from 1 to 2^63
WEIGHT_BLOCK = 1024
"""How many buckets a program adds up at once; a larger table is added up in several launches."""

_PLAN_TILES = 16


class Bins(NamedTuple):
    """Buckets by bin of the distance (its exponent and three bits of its mantissa).

    `boundaries` [bins] int64 and `buckets` [2 * bins] int32: the bucket below a bin's boundary, and the one from it on.
    """

    boundaries: Tensor
    buckets: Tensor


@lru_cache
def bins(num_buckets: int, device: torch.device) -> Bins:
    """The tables for so many buckets besides the first."""
    largest = np.iinfo(np.int64).max
    edges = bucket_boundaries(num_buckets).numpy()
    starts = np.array([_first_distance(bin) for bin in range(NUM_BINS)] + [largest], dtype=np.int64)
    low, high = starts[:-1], np.maximum(starts[1:] - 1, starts[:-1])
    high[-1] = largest
    below = np.searchsorted(edges, low, side="right")
    above = np.searchsorted(edges, high, side="right")
    boundary = np.where(above > below, np.append(edges, largest)[np.minimum(below, edges.size)], largest)
    # One boundary a bin, but for those beyond int64, which are all its maximum.
    assert np.all((above - below <= 1) | (boundary == largest))
    return Bins(
        torch.from_numpy(boundary).to(device), torch.from_numpy(np.stack([below, above], 1).ravel()).int().to(device)
    )


def _first_distance(bin: int) -> int:
    """The smallest whole distance that rounds to a number of this bin or a later one, as fp32."""
    exponent, eighths = divmod(bin, 8)
    edge = (8 + eighths) << exponent  # in eighths
    if exponent < 24:
        return -(-edge // 8)
    spacing = 1 << (exponent - (24 if eighths == 0 else 23))  # of the fp32 numbers below the edge
    return edge // 8 - spacing // 2


class BiasTables(NamedTuple):
    """Arguments of a kernel that reads the weights of time buckets."""

    bin_boundaries: Tensor
    bin_weights: Tensor
    plan: Tensor
    plan_width: int


def plan_buckets(
    query_times: Tensor,
    key_times: Tensor,
    time_weight: Tensor,
    offsets: Tensor,
    rows: TileMap,
    max_len: int,
    block_q: int,
    block_k: int,
) -> BiasTables:
    """Find the tiles whose pairs all lie in one bucket, for tiles of block_q queries and block_k keys."""
    table = bins(time_weight.numel() - 1, offsets.device)
    width = -(-max_len // block_k)
    num_tiles = rows.tile_sequence.numel()
    plan = torch.empty(num_tiles * width, dtype=torch.int32, device=offsets.device)
    if num_tiles:
        kernel("relative_weights", "bucket_plan")[(num_tiles,)](
            *(query_times, key_times, offsets, *rows, *table, plan, width),
            BLOCK_Q=block_q,
            BLOCK_K=block_k,
            TILES=_PLAN_TILES,
        )
    return BiasTables(table.boundaries, time_weight.index_select(0, table.buckets.long()), plan, width)


class Splits(NamedTuple):
    """How the pass over diagonals is cut: diagonals of tiles, and parts of the batch."""

    diagonals: int
    parts: int


def split_diagonals(max_len: int, num_sequences: int, block: int, *, ranges: bool) -> Splits:
    """Enough programs to fill a device, as few partial sums as that allows; both follow from the shape alone."""
    side = -(-max_len // block)
    diagonals = 2 * side - 1 if ranges else side
    return Splits(diagonals, max(1, min(num_sequences, -(-512 // diagonals))))


def add_diagonals(sums: Tensor, max_len: int, *, ranges: bool) -> Tensor:
    """Gradient of the position table, [2 * max_len - 1], from sums over tiles [diagonals, n, n].

    Diagonals are those of tiles, from the one farthest above the main one (with ranges; else from the main one) down.
    """
    count, n, _ = sums.shape
    # Row r of the flipped tile moves r places to the right, so that the tile's diagonals become columns.
    skewed = F.pad(sums.flip(1), (0, n)).flatten(1)[:, : n * (2 * n - 1)].view(count, n, 2 * n - 1)
    halves = F.pad(skewed.sum(1), (0, 1)).view(count, 2, n).flip(0)
    # The second half of a diagonal's line and the first half of the next one's are the same distances.
    line = (F.pad(halves[:, 0], (0, 0, 0, 1)) + F.pad(halves[:, 1], (0, 0, 1, 0))).flatten()
    farthest = (count + 1) // 2 if ranges else count
    line = line[farthest * n - max_len :][: 2 * max_len - 1]
    return F.pad(line, (0, 2 * max_len - 1 - line.numel()))
