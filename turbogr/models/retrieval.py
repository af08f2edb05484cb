"""Retrieval: from a user's items to a vector that lies close to the next item's.

The model owns its dense parameters only. It says which items it needs (`ids`) and computes from their vectors (`loss`,
`encode`); the caller fetches them, from wherever the item table lives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turbogr.config import ModelConfig
from turbogr.data.batching import Batch
from turbogr.layers.block import Block
from turbogr.layers.fuxi import FuXiAlphaBlock, FuXiBetaBlock, FuXiGammaBlock
from turbogr.layers.hstu import HSTUBlock
from turbogr.layers.item_table import WorkingSet
from turbogr.layers.sasrec import SASRecBlock
from turbogr.layers.tokens import Tokens
from turbogr.negatives import Objective
from turbogr.ops import embed

BLOCKS: dict[str, type[Block]] = {
    "hstu": HSTUBlock,
    "sasrec": SASRecBlock,
    "fuxi-alpha": FuXiAlphaBlock,
    "fuxi-beta": FuXiBetaBlock,
    "fuxi-gamma": FuXiGammaBlock,
}
"""The block of every model by the name in its config."""

_INPUT_SITE = 0


class RetrievalModel(nn.Module):
    """Items and positions are embedded, pass through the blocks, and the result predicts the next item at each token.

    The config must be resolved: every size is set. Parameters are not initialised until `reset_parameters`.
    With `recompute`, a backward pass keeps the input of every block alone and computes what is inside once more.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        config = config.with_preset()
        assert config.dim and config.max_len and config.num_blocks, "resolve the config first"
        self.config = config
        self.dim, self.max_len = config.dim, config.max_len
        self.position = nn.Parameter(torch.empty(config.max_len, config.dim))
        block = BLOCKS[config.name]
        self.blocks = nn.ModuleList(
            block(config, _INPUT_SITE + 1 + number * block.num_sites) for number in range(config.num_blocks)
        )

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all parameters anew; the same generator state gives the same parameters."""
        nn.init.trunc_normal_(self.position, std=math.sqrt(1.0 / self.dim), generator=generator)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters(generator)

    @staticmethod
    def ids(batch: Batch, negatives: Tensor) -> list[Tensor]:
        """Return every item that the loss of a batch needs: inputs [T], targets [T], negatives of any shape."""
        assert batch.targets is not None
        return [batch.items.values, batch.targets, negatives]

    def loss(
        self, fetched: WorkingSet, batch: Batch, *, objective: Objective, step: int, seed: int | None = None
    ) -> Tensor:
        """Return the loss of every token, [T], from the rows of `ids(batch, objective.draw(batch, step))`.

        `seed` decides what is dropped; without it nothing is.
        """
        candidates = fetched.index[batch.num_tokens :]
        rows, inputs = fetched.for_inputs(batch.num_tokens, batch.items.values.device)
        outputs = self.encode(rows, inputs, batch, seed=seed)
        return objective.loss(outputs, fetched.for_loss(), candidates, fetched.ids, batch, step)

    def encode(self, rows: Tensor, index: Tensor, batch: Batch, *, seed: int | None = None) -> Tensor:
        """Return the output of every token before normalisation, [T, D]; `index` [T] places the inputs in `rows` [R,
        D].

        Nothing is dropped unless a `seed` is given.
        """
        tokens = Tokens(batch.items.offsets, batch.times, batch.next_times, batch.events, seed)
        x_td = embed(
            rows,
            index,
            self.position,
            batch.items.positions(),
            scale=math.sqrt(self.dim),
            dropout=tokens.dropout(self.config.dropout, _INPUT_SITE),
            keys=batch.events,
        )
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                # What is dropped follows from keys, not from a generator whose state would have to be kept.
                x_td = checkpoint(block, x_td, tokens, use_reentrant=False, preserve_rng_state=False)
            else:
                x_td = block(x_td, tokens)
        return x_td

    def num_parameters(self) -> int:
        """Number of dense parameters."""
        return sum(parameter.numel() for parameter in self.parameters())
