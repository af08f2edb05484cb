"""Exact positions of items and top-k lists over the whole catalogue, in bounded memory and with reproducible digits.

Candidates are ordered by (score descending, item row ascending). That order is total, so ties do not depend on the
sorting algorithm.

A matrix product may round differently when its shape changes, and metrics would then depend on the batch size. Here
every product has the same shape: TILE queries (the last tile padded with zeros) times CHUNK items (the last chunk is
shorter, always by the same amount). Query i of a call is in tile i // TILE. A caller that starts its calls at multiples
of TILE therefore gets the same digits however many queries it passes at once. The scores of targets and of seen items
are read from the same products; no score is computed in two ways.

Positions with and without a query's seen items come from one pass: the second are the first less the seen items that
come before the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from turbogr.errors import UserError
from turbogr.evaluation.metrics import MISSED
from turbogr.jagged import Jagged

TILE = 64
CHUNK = 8192
HELD_BYTES = 64 << 20  # scores kept between the two passes of target_positions; beyond this they are computed again


class ItemVectors(Protocol):
    """The item vectors of a catalogue, read by ranges of rows, so that a large table is never copied as a whole."""

    @property
    def num_items(self) -> int: ...

    def item_rows(self, start: int, stop: int) -> Tensor:
        """Return the vectors of item rows start..stop - 1, [stop - start, d]."""
        ...


@dataclass(frozen=True)
class DenseItems:
    """`ItemVectors` of a matrix [V, d] of final vectors."""

    matrix: Tensor

    @property
    def num_items(self) -> int:
        return self.matrix.shape[0]

    def item_rows(self, start: int, stop: int) -> Tensor:
        return self.matrix[start:stop]


class Scores(Protocol):
    """Scores of some queries against all items, by tiles of TILE queries and ranges of item rows.

    A score must not depend on how many queries there are, only on those of its tile and on the range.
    """

    @property
    def num_queries(self) -> int: ...

    @property
    def num_items(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def of(self, tile: int, start: int, stop: int) -> Tensor:
        """Return the scores [TILE, stop - start] of a tile against item rows start..stop - 1, for the caller to change.

        Rows of the last tile that no query has may hold anything finite.

        Raises:
            UserError: a score that is not a finite number.
        """
        ...


def held_queries(num_items: int) -> int:
    """Return how many queries (a multiple of TILE, at most 512) `target_positions` should get in one call."""
    fitting = HELD_BYTES // (4 * max(1, num_items)) // TILE * TILE
    return fitting if 0 < fitting < 512 else 512


class TargetPositions(NamedTuple):
    """1-based positions [n] int64 of each query's target: among all items but the query's seen ones, and among all."""

    exclude_seen: Tensor
    include_seen: Tensor


def target_positions(scores: Scores, targets: Tensor, seen: Jagged | None = None) -> Tensor:
    """Return the 1-based position of each query's target among all items but the query's seen ones, [n] int64.

    As `positions_both_ways`, which has the arguments and the rule.
    """
    if seen is None:
        seen = Jagged(targets[:0], targets.new_zeros(len(targets) + 1))
    return positions_both_ways(scores, targets, seen).exclude_seen


@torch.no_grad()
def positions_both_ways(scores: Scores, targets: Tensor, seen: Jagged) -> TargetPositions:
    """Return the 1-based positions of each query's target with and without the query's seen items.

    targets [n] int64 item rows; seen: n lists of item rows, in any order, repeats allowed. Where seen items are
    excluded, a target that was seen is not a candidate either and has the position MISSED: if the filter kept it, and
    it alone, the filter would reveal it.

    Raises:
        UserError: a score that is not a finite number.
    """
    num_queries = scores.num_queries
    assert targets.shape == (num_queries,), f"{num_queries} queries but targets of shape {tuple(targets.shape)}"
    held = _HeldScores(scores)
    masks = _masks(seen, scores)
    target = torch.zeros(held.num_tiles * TILE, dtype=torch.int64, device=scores.device)
    target[:num_queries] = targets
    target = target.view(-1, TILE, 1)

    target_score = torch.empty(target.shape, dtype=scores.dtype, device=scores.device)
    for chunk, start, stop in _chunks(scores):
        for tile in range(held.num_tiles):
            inside = _inside(target[tile], start, stop)
            if len(inside):
                values = held.of(tile, chunk)
                target_score[tile, inside, 0] = values[inside, target[tile, inside, 0] - start]

    better = torch.zeros(target.shape[:2], dtype=torch.int64, device=scores.device)
    better_and_seen = torch.zeros_like(better)
    for chunk, start, stop in _chunks(scores):
        for tile in range(held.num_tiles):
            values = held.take(tile, chunk)
            inside = _inside(target[tile], start, stop)
            better[tile] += _num_better(values, target_score[tile], target[tile] - start, len(inside))
            better_and_seen[tile] += masks[tile].num_better(values, chunk, target_score[tile], target[tile])
    among_all = better.view(-1)[:num_queries] + 1
    among_unseen = among_all - better_and_seen.view(-1)[:num_queries]
    of_query = seen.row_index()
    among_unseen[of_query[seen.values == targets[of_query]]] = MISSED
    return TargetPositions(among_unseen, among_all)


@torch.no_grad()
def top_k(scores: Scores, k: int, exclude: Jagged | None = None) -> tuple[Tensor, Tensor]:
    """Return the k best items of each query, best first: scores [n, k] and item rows [n, k] int64.

    exclude: n lists of item rows that may not be returned. Where fewer than k candidates remain, the row is -1 and the
    score -inf.

    Raises:
        UserError: a score that is not a finite number, or a k below 1.
    """
    if k < 1:
        raise UserError(f"k is {k}; ask for at least 1 item")
    masks = _masks(exclude, scores)
    shape = (_num_tiles(scores), TILE, k)
    best = torch.full(shape, -torch.inf, dtype=scores.dtype, device=scores.device)
    rows = torch.full(shape, -1, dtype=torch.int64, device=scores.device)
    for chunk, start, stop in _chunks(scores):
        for tile in range(shape[0]):
            values = scores.of(tile, start, stop)
            masks[tile].apply(values, chunk)
            found, columns = _top_columns(values, k)
            # Both lists are in order and this chunk's rows are larger than all before: a stable sort keeps ties right.
            merged, order = torch.cat([best[tile], found], 1).sort(dim=1, descending=True, stable=True)
            merged_rows = torch.cat([rows[tile], columns + start], 1).gather(1, order)
            best[tile] = merged[:, :k]
            rows[tile] = merged_rows[:, :k]
    rows[best == -torch.inf] = -1
    return best.view(-1, k)[: scores.num_queries], rows.view(-1, k)[: scores.num_queries]


class VectorScores:
    """Scores as dot products of query vectors [n, d] with the items'."""

    def __init__(self, queries: Tensor, items: ItemVectors) -> None:
        self.dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
        self.num_queries, self.width = queries.shape
        self.num_items, self.device = items.num_items, queries.device
        tiles = torch.zeros(_num_tiles(self) * TILE, self.width, dtype=self.dtype, device=queries.device)
        tiles[: self.num_queries] = queries
        self._tiles = tiles.view(-1, TILE, self.width)
        self._largest_query = tiles.abs().max() if self.num_queries else torch.zeros(())
        self._items = items
        self._range, self._rows = (-1, -1), tiles

    def of(self, tile: int, start: int, stop: int) -> Tensor:
        return self._tiles[tile] @ self._item_rows(start, stop).T

    def _item_rows(self, start: int, stop: int) -> Tensor:
        if (start, stop) != self._range:
            rows = self._items.item_rows(start, stop).to(self.dtype)
            assert rows.shape == (stop - start, self.width), f"item rows {start}..{stop} came as {tuple(rows.shape)}"
            # One bound detects NaN (no comparison holds), infinity and overflow, without a pass over the scores.
            bound = self._largest_query * rows.abs().max() * self.width
            if not bool(bound < torch.finfo(self.dtype).max):
                raise UserError(
                    f"the scores of item rows {start} to {stop - 1} are not finite numbers: the model's weights "
                    "overflowed or are damaged; use an earlier checkpoint, or train again with a lower learning rate"
                )
            self._range, self._rows = (start, stop), rows
        return self._rows


class MatrixScores:
    """Scores that are given, [n, V]."""

    def __init__(self, values: Tensor) -> None:
        self.num_queries, self.num_items = values.shape
        self.device, self.dtype = values.device, values.dtype
        self._values = values

    def of(self, tile: int, start: int, stop: int) -> Tensor:
        found = self._values[tile * TILE : (tile + 1) * TILE, start:stop]
        if found.shape[0] == TILE:
            return found.clone()
        padded = found.new_zeros(TILE, stop - start)
        padded[: found.shape[0]] = found
        return padded


class _HeldScores:
    """Scores that are read twice, kept in between if they fit into HELD_BYTES."""

    def __init__(self, scores: Scores) -> None:
        self.scores, self.num_tiles = scores, _num_tiles(scores)
        size = self.num_tiles * TILE * scores.num_items * scores.dtype.itemsize
        self._hold = size <= HELD_BYTES
        self._held: dict[tuple[int, int], Tensor] = {}

    def of(self, tile: int, chunk: int) -> Tensor:
        """Return the scores [TILE, items of the chunk]; the caller must not change them."""
        values = self._held.get((tile, chunk))
        if values is None:
            values = self._compute(tile, chunk)
            if self._hold:
                self._held[tile, chunk] = values
        return values

    def take(self, tile: int, chunk: int) -> Tensor:
        """Return the scores [TILE, items of the chunk] and forget them; the caller may change them."""
        values = self._held.pop((tile, chunk), None)
        return self._compute(tile, chunk) if values is None else values

    def _compute(self, tile: int, chunk: int) -> Tensor:
        return self.scores.of(tile, chunk * CHUNK, min((chunk + 1) * CHUNK, self.scores.num_items))


def _num_tiles(scores: Scores) -> int:
    return -(-scores.num_queries // TILE)


def _num_chunks(scores: Scores) -> int:
    return -(-scores.num_items // CHUNK)


def _chunks(scores: Scores) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk, first item row, one past the last item row)."""
    for chunk in range(_num_chunks(scores)):
        yield chunk, chunk * CHUNK, min((chunk + 1) * CHUNK, scores.num_items)


@dataclass(frozen=True)
class _Mask:
    """Distinct pairs (query of the tile, item row) that are no candidates, by item row; `bounds` cuts them by chunk."""

    queries: Tensor
    rows: Tensor
    bounds: list[int]

    def apply(self, values: Tensor, chunk: int) -> None:
        cut = slice(self.bounds[chunk], self.bounds[chunk + 1])
        values[self.queries[cut], self.rows[cut] - chunk * CHUNK] = -torch.inf

    def num_better(self, values: Tensor, chunk: int, target_score: Tensor, target: Tensor) -> Tensor:
        """Count the pairs of a chunk whose items come before the query's target, [TILE]."""
        cut = slice(self.bounds[chunk], self.bounds[chunk + 1])
        queries, rows = self.queries[cut], self.rows[cut]
        found, wanted = values[queries, rows - chunk * CHUNK], target_score[queries, 0]
        before = (found > wanted) | ((found == wanted) & (rows < target[queries, 0]))
        return torch.bincount(queries[before], minlength=TILE)


def _masks(excluded: Jagged | None, scores: Scores) -> list[_Mask]:
    starts = torch.arange(_num_chunks(scores) + 1) * CHUNK
    if excluded is None:
        nothing = torch.empty(0, dtype=torch.int64)
        return [_Mask(nothing, nothing, [0] * len(starts))] * _num_tiles(scores)
    assert excluded.num_rows == scores.num_queries, f"{scores.num_queries} queries, {excluded.num_rows} rows to exclude"
    starts = starts.to(excluded.values.device)
    query_of = excluded.row_index()
    masks = []
    for first in range(0, scores.num_queries, TILE):
        last = min(first + TILE, scores.num_queries)
        cut = slice(int(excluded.offsets[first]), int(excluded.offsets[last]))
        pairs, _ = (excluded.values[cut].to(torch.int64) * TILE + query_of[cut] - first).sort()
        pairs = pairs[torch.cat([pairs.new_ones(min(1, len(pairs))), pairs.diff()]) > 0]
        rows, queries = pairs.div(TILE, rounding_mode="floor"), pairs % TILE
        assert len(rows) == 0 or 0 <= int(rows[0]) <= int(rows[-1]) < scores.num_items, "an excluded row is not an item"
        masks.append(_Mask(queries, rows, torch.searchsorted(rows, starts).tolist()))
    return masks


def _inside(target: Tensor, start: int, stop: int) -> Tensor:
    """Return which queries of a tile have their target among the item rows start..stop - 1; target [TILE, 1]."""
    return ((target >= start) & (target < stop))[:, 0].nonzero()[:, 0]


def _num_better(values: Tensor, target_score: Tensor, target_column: Tensor, num_inside: int) -> Tensor:
    """Count the columns of `values` [TILE, c] before the target, [TILE]; of ties the smaller column is first."""
    greater = (values > target_score).sum(1, dtype=torch.int32)
    not_less = (values >= target_score).sum(1, dtype=torch.int32)
    # Every target ties with itself once; only when there are more ties does their order matter.
    if int((not_less - greater).sum()) > num_inside:
        before = torch.arange(values.shape[1], device=values.device) < target_column
        greater = greater + ((values == target_score) & before).sum(1, dtype=torch.int32)
    return greater.to(torch.int64)


def _top_columns(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the min(k, c) best of `values` [TILE, c] and their columns: value descending, then column ascending."""
    if k >= values.shape[1]:
        return _sorted(values)
    found, columns = values.topk(k, dim=1)
    # topk may take any of the columns that tie for the last place; those rows are sorted in full.
    tied = (values >= found[:, -1:]).sum(1) > k
    columns, order = columns.sort(dim=1)
    found, order = found.gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    if bool(tied.any()):
        full, full_columns = _sorted(values[tied])
        found[tied], columns[tied] = full[:, :k], full_columns[:, :k]
    return found, columns


def _sorted(values: Tensor) -> tuple[Tensor, Tensor]:
    found, columns = values.sort(dim=1, descending=True, stable=True)
    return found, columns
