"""Retrieval: from a user's items to a vector that lies close to the next item's.

The model owns its dense parameters only. It computes from the items' vectors, which the caller fetches from wherever
the table lives; `turbogr.tasks.retrieval` says which rows a batch needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turbogr.config import ModelConfig
from turbogr.data.batching import Batch
from turbogr.errors import UserError
from turbogr.layers.attention_masks import make_mask
from turbogr.layers.block import Block
from turbogr.layers.tokens import Tokens
from turbogr.ops import embed, keyed_dropout
from turbogr.plugins import find

_INPUT_SITE = 0
_FEATURE_SITE = 0xFEA7


class RetrievalModel(nn.Module):
    """Items and positions are embedded, pass through the blocks, and the result predicts the next item at each token.

    The config must be resolved: every size is set. `options` are the sections of its components, by name. Parameters
    have no values until `reset_parameters`. With `recompute`, a backward pass keeps only the input of every block and
    computes what is inside once more. With the `precision` bf16 the blocks take and return bf16, and outputs are fp32
    again. `features` are the widths of the features' rows by name; they are added to the
    tokens, projected where the width is not the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        options: Mapping[str, Any] | None = None,
        recompute: bool = False,
        precision: str = "fp32",
        features: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.recompute, self.precision = recompute, precision
        config = config.with_preset()
        assert config.dim and config.max_len and config.num_blocks, "resolve the config first"
        self.config = config
        self.dim, self.max_len = config.dim, config.max_len
        self.position = nn.Parameter(torch.empty(config.max_len, config.dim))
        self.mask = make_mask(config, options)
        self.features = dict(features or {})
        self.feature_weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(width, config.dim))
                for name, width in self.features.items()
                if width != config.dim
            }
        )
        component = find("block", config.name)
        section, num_sites = component.section(options), component.factory.num_sites
        self.blocks = nn.ModuleList(
            component.factory(config, _INPUT_SITE + 1 + number * num_sites, section)
            for number in range(config.num_blocks)
        )
        for block in self.blocks:
            if isinstance(block, Block):
                block.join(self.blocks[0])  # type: ignore[arg-type]

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all parameters; the same generator state gives the same parameters."""
        nn.init.trunc_normal_(self.position, std=math.sqrt(1.0 / self.dim), generator=generator)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters(generator)
        for weight in self.feature_weights.values():
            nn.init.xavier_normal_(weight, generator=generator)

    def encode(
        self,
        rows: Tensor,
        index: Tensor,
        batch: Batch,
        *,
        seed: int | None = None,
        features: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the output of every token before normalisation, [T, D]; `index` [T] points at `rows` [R, D].

        `features` has the vectors [T, width] of every feature by name. Nothing is dropped unless a `seed` is given.
        """
        if batch.on_host is not None:
            self._see(_tokens(batch.on_host, seed))
        tokens = self._see(_tokens(batch, seed))
        x_td = embed(
            rows,
            index,
            self.position,
            batch.items.positions(),
            scale=math.sqrt(self.dim),
            dropout=tokens.dropout(self.config.dropout, _INPUT_SITE),
            keys=batch.events,
        )
        for number, name in enumerate(self.features):
            assert features is not None, "the model has features"
            dropout = tokens.dropout(self.config.dropout, _FEATURE_SITE + number)
            x_td = x_td + keyed_dropout(self._project(name, features[name]), dropout, batch.events)
        given, x_td = x_td.dtype, x_td.to(torch.bfloat16 if self.precision == "bf16" else x_td.dtype)
        try:
            x_td = self._pass_through_blocks(x_td, tokens)
        except RuntimeError as error:
            if self.precision != "bf16" or "dtype" not in str(error):
                raise
            raise UserError(
                f"the block '{self.config.name}' does not compute in {self.precision}: {error}. It gets bf16 vectors "
                "and has fp32 parameters: write x @ weight.to(x.dtype), use our operators, or set train.precision=fp32"
            ) from error
        return x_td.to(given)

    def _pass_through_blocks(self, x_td: Tensor, tokens: Tokens) -> Tensor:
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                # What is dropped follows from keys, not from a generator whose state would have to be kept.
                x_td = checkpoint(block, x_td, tokens, use_reentrant=False, preserve_rng_state=False)
            else:
                x_td = block(x_td, tokens)
        return x_td

    def _project(self, name: str, vectors: Tensor) -> Tensor:
        """Return a feature's vectors at the model's width, [T, D], scaled like those of the items."""
        vectors = vectors * math.sqrt(self.dim)
        return vectors @ self.feature_weights[name] if name in self.feature_weights else vectors

    def _see(self, tokens: Tokens) -> Tokens:
        """Return the tokens with what each one sees.

        Raises:
            UserError: a token sees a later one, whose item is what it must predict.
        """
        visible = self.mask.ranges(tokens)
        if visible is None:
            return tokens
        if tokens.offsets.device.type != "cpu":  # `encode` has asked the batch in host memory
            return tokens._replace(visible=visible)
        late = visible.last - tokens.positions() - 1
        if late.numel() and int(late.max()) > 0:
            position = int(tokens.positions()[late.argmax()])
            raise UserError(
                f"the mask '{self.config.mask}' lets position {position} of a sequence see position "
                f"{position + int(late.max())}, which comes later; retrieval predicts later items, so `last` may be at "
                "most the position + 1"
            )
        return tokens._replace(visible=visible)

    def num_parameters(self) -> int:
        """Number of dense parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def _tokens(batch: Batch, seed: int | None) -> Tokens:
    return Tokens(batch.items.offsets, batch.times, batch.next_times, batch.events, seed)
