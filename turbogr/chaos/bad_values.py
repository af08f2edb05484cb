"""Losses and gradients that are not finite, put into chosen steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from turbogr.training.step import Stepper


class _InfiniteGradient(torch.autograd.Function):
    """Zero, with an infinite gradient for one element."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        found = grad.new_zeros(ctx.shape)
        found.view(-1)[0] = float("inf")
        return found


@contextmanager
def bad_values(kind: str, steps: Collection[int], rank: int = 0) -> Iterator[None]:
    """Make the steps, counted from 0, bad on a rank, whenever they are computed; `kind` is one of BAD_VALUES."""
    original = Stepper.loss

    def loss(self: Stepper, batch: Any, sets: Any, step: int) -> Tensor:
        value = original(self, batch, sets, step)
        if step not in steps or self.mesh.world.rank != rank:
            return value
        if kind == "loss":
            return value * float("nan")
        tensor = sets.groups[0].rows if kind == "rows" else next(self.model.parameters())
        return value + _InfiniteGradient.apply(tensor)  # type: ignore[no-untyped-call, no-any-return]

    with mock.patch.object(Stepper, "loss", loss):
        yield
