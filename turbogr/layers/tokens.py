"""What a block and a mask know of a batch besides the vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops import KeyRanges
from turbogr.random import Dropout, derive_seed


class Tokens(NamedTuple):
    """T tokens in B sequences.

    `offsets` [B + 1]; `times` [T] of the tokens' own items; `next_times` [T] of the items they predict; `keys` [T]
    name the tokens for dropout; `seed` is the step's, None when nothing is dropped (evaluation). `visible` is which
    tokens each one sees, as the attention operators take it; None is causal.
    """

    offsets: Tensor
    times: Tensor
    next_times: Tensor
    keys: Tensor
    seed: int | None
    visible: KeyRanges | None = None

    def positions(self) -> Tensor:
        """Return the position of every token in its own sequence, [T] int64, from 0."""
        lengths = self.offsets.diff()
        starts = self.offsets[:-1].repeat_interleave(lengths, output_size=self.keys.shape[0])
        return torch.arange(self.keys.shape[0], device=self.offsets.device) - starts

    def dropout(self, rate: float, site: int) -> Dropout | None:
        """Return the dropout of one place in the model; every `site` drops independently."""
        if self.seed is None or rate == 0.0:
            return None
        return Dropout(rate, derive_seed(self.seed, site))
