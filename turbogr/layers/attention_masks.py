"""Attention masks: which tokens of its own sequence a token sees, as a range of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbogr.config import ModelConfig
from turbogr.errors import UserError
from turbogr.layers.tokens import Tokens
from turbogr.ops import KeyRanges
from turbogr.plugins import find, register


class Mask:
    """Computes what tokens see, once per batch. Register one with `@register("mask", name)` to choose it by name.

    `options` is the mask's own section of the config, None if it has none.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def ranges(self, tokens: Tokens) -> KeyRanges | None:
        """Return the first and the last key, exclusive, that each token sees, as positions in its own sequence.

        A token always sees itself besides. None is causal attention, which is the fastest.
        """
        raise NotImplementedError

    def num_pairs(self, lengths: Tensor) -> float:
        """Return how many pairs of tokens see each other in sequences of `lengths` [B], for counting FLOPs.

        This one asks `ranges`, with all times 0.
        """
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int64)
        times = torch.zeros(int(offsets[-1]), dtype=torch.int64)
        tokens = Tokens(offsets, times, times, times, None)
        visible = self.ranges(tokens)
        if visible is None:
            return CausalMask().num_pairs(lengths)
        own = tokens.positions()
        itself = (own < visible.first) | (own >= visible.last)
        return float((visible.last - visible.first).clamp(min=0).sum() + itself.sum())


@register("mask", "causal")
class CausalMask(Mask):
    """Every token sees itself and all earlier ones."""

    def ranges(self, tokens: Tokens) -> None:
        return None

    def num_pairs(self, lengths: Tensor) -> float:
        lengths = lengths.double()
        return float((lengths * (lengths + 1) / 2).sum())


@dataclass(frozen=True)
class WindowConfig:
    """Every position sees the last `size` events, its own included."""

    size: int = 64

    def check(self) -> None:
        if self.size < 1:
            raise UserError(f"window.size must be positive, got {self.size}")


@register("mask", "window", config=WindowConfig)
class WindowMask(Mask):
    """Every token sees itself and the `size` - 1 tokens before it."""

    def ranges(self, tokens: Tokens) -> KeyRanges:
        position = tokens.positions()
        return KeyRanges((position + 1 - self.options.size).clamp(min=0), position + 1)


def make_mask(config: ModelConfig, options: Any = None) -> Mask:
    """Build the mask that a config names; `options` are the sections of its components, by name.

    Raises:
        UserError: the block cannot be given this mask.
    """
    if config.mask != "causal" and getattr(find("block", config.name).factory, "only_causal", False):
        raise UserError(
            f"model.mask is '{config.mask}', but {config.name} sees all earlier tokens and has no other masks; set "
            "model.mask=causal or choose another model.name"
        )
    component = find("mask", config.mask)
    mask: Mask = component.factory(component.section(options))
    return mask
