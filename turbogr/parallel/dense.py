"""Data parallelism of the dense parameters: one flat gradient, summed over all ranks in one all-reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from turbogr.parallel.world import World, contact


class FlatGradients:
    """The gradients of a model as views of one buffer.

    Call `attach` before the backward; `start` and `finish` around what can overlap with the sum over the ranks. The
    all-reduce computes every element on one rank and hands it to the others, so the sums are equal on all, bit for bit.
    In a world of one rank all three do nothing.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        self._parameters = list(model.parameters())
        self._work: Any = None
        if world.size > 1:
            first = self._parameters[0]
            size = sum(parameter.numel() for parameter in self._parameters)
            self._flat = torch.zeros(size, dtype=first.dtype, device=first.device)

    def attach(self) -> None:
        """Make zeros, in the buffer, the gradients that the backward adds to; a rank without work leaves them so."""
        if self.world.size == 1:
            return
        self._flat.zero_()
        pieces = self._flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def start(self) -> None:
        """Begin the sum over the ranks."""
        if self.world.size > 1:
            with contact("dense"):
                self._work = dist.all_reduce(self._flat, async_op=True)

    def finish(self) -> None:
        """Wait for the sum; the parameters' gradients are global from here on."""
        if self._work is not None:
            with contact("dense"):
                self._work.wait()
            self._work = None
