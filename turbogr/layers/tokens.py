"""What a block needs to know of a batch besides the vectors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from turbogr.random import Dropout, derive_seed


class Tokens(NamedTuple):
    """T tokens in B sequences.

    `offsets` [B + 1]; `times` [T] of the tokens' own items; `next_times` [T] of the items they predict; `keys` [T]
    name the tokens for dropout; `seed` is the step's, None when nothing is dropped (evaluation).
    """

    offsets: Tensor
    times: Tensor
    next_times: Tensor
    keys: Tensor
    seed: int | None

    def dropout(self, rate: float, site: int) -> Dropout | None:
        """Return the dropout of one place in the model; every `site` has masks of its own."""
        if self.seed is None or rate == 0.0:
            return None
        return Dropout(rate, derive_seed(self.seed, site))
