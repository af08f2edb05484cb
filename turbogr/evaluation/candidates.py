"""Restricting which items may be recommended: for all queries, or for some of them.

The scores of other items become -inf, so `top_k` does not return them; the scores of candidates keep their digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.evaluation.item_ranking import TILE, Scores
from turbogr.jagged import Jagged


class CandidateScores:
    """`scores` of candidates alone.

    `allowed` [V] bool are the candidates of all queries, None for all items. `own` has a list of item rows per query,
    which are the only candidates of those queries that `restricted` [n] bool names.
    """

    def __init__(
        self, scores: Scores, allowed: Tensor | None, own: Jagged | None = None, restricted: Tensor | None = None
    ) -> None:
        self.num_queries, self.num_items = scores.num_queries, scores.num_items
        self.device, self.dtype = scores.device, scores.dtype
        self._scores = scores
        self._forbidden = None if allowed is None else ~allowed.to(scores.device)
        self._own, self._restricted = own, restricted
        assert (own is None) == (restricted is None), "lists and which queries they restrict come together"

    def of(self, tile: int, start: int, stop: int) -> Tensor:
        forbidden = None if self._forbidden is None else self._forbidden[start:stop]
        if forbidden is not None and bool(forbidden.all()):
            return torch.full((TILE, stop - start), -torch.inf, dtype=self.dtype, device=self.device)
        values = self._scores.of(tile, start, stop)
        if forbidden is not None:
            values[:, forbidden] = -torch.inf
        if self._own is not None and self._restricted is not None:
            self._apply_own(values, tile, start, stop)
        return values

    def _apply_own(self, values: Tensor, tile: int, start: int, stop: int) -> None:
        assert self._own is not None and self._restricted is not None
        first, last = tile * TILE, min((tile + 1) * TILE, self.num_queries)
        blocked = torch.zeros(TILE, stop - start, dtype=torch.bool)
        blocked[: last - first] = self._restricted[first:last, None]
        cut = slice(int(self._own.offsets[first]), int(self._own.offsets[last]))
        rows, queries = self._own.values[cut], self._own.row_index()[cut] - first
        inside = (rows >= start) & (rows < stop)
        blocked[queries[inside], rows[inside] - start] = False
        values.masked_fill_(blocked.to(values.device), -torch.inf)
