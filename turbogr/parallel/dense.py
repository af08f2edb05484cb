"""Data parallelism of the dense parameters: gradients in one flat buffer, summed over the ranks while backward runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbogr.parallel.world import World, contact

_LEAST_BUCKET, _BUCKET_PER_RANK = 4 << 20, 256 << 10


def bucket_bytes_for(size: int) -> int:
    """Return how many bytes `size` ranks sum at a time.

    Small buckets start early. But a ring cuts each into as many parts as there are ranks and passes every part on as a
    message of its own, so buckets grow with the ranks, lest messages get so small that their number counts.
    """
    return max(_LEAST_BUCKET, _BUCKET_PER_RANK * size)


class FlatGradients:
    """The gradients of a model as views of one buffer, which is cut into buckets of about `bucket_bytes`, or
    `bucket_bytes_for` the world.

    Call `attach` before the one backward; the sum of a bucket begins when the backward has filled it, always in the
    same order, `start` begins what is left, and `finish` waits. The all-reduce computes every element on one rank and
    hands it to the others, so the sums are equal on all, bit for bit. It has a process group of its own: what else
    ranks say to each other meanwhile may come in any order. In a world of one rank all of this does nothing.
    """

    def __init__(self, model: nn.Module, world: World, bucket_bytes: int | None = None) -> None:
        self.world = world
        bucket_bytes = bucket_bytes or bucket_bytes_for(world.size)
        self._works: list[Any] = []
        self._missing: list[int] = []
        """How many parameters of every bucket the backward has yet to fill; empty when nothing is attached."""
        if world.size == 1:
            return
        with contact():
            self._ranks = dist.new_group()
        # The backward fills gradients from the last layer to the first.
        self._parameters = list(model.parameters())[::-1]
        first = self._parameters[0]
        self._bucket_of: dict[Tensor, int] = {}
        self._num_in, lengths = [0], [0]
        for parameter in self._parameters:
            if lengths[-1] * first.element_size() >= bucket_bytes:
                self._num_in.append(0)
                lengths.append(0)
            self._num_in[-1] += 1
            lengths[-1] += parameter.numel()
            self._bucket_of[parameter] = len(lengths) - 1
        self._flat = torch.zeros(sum(lengths), dtype=first.dtype, device=first.device)
        self._buckets = self._flat.split(lengths)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._filled)

    def attach(self) -> None:
        """Make zeros, in the buffer, the gradients that the backward adds to; a rank without work leaves them so."""
        if self.world.size == 1:
            return
        self._flat.zero_()
        pieces = self._flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        assert not self._works, "`finish` the sums of the step before"
        self._missing = list(self._num_in)

    def _filled(self, parameter: Tensor) -> None:
        """Begin the sums of all buckets that are full and whose turn it is."""
        if not self._missing:
            return
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        assert self._missing[bucket] >= 0, "a second backward after `attach`: its gradients would miss the sum"
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            self._begin_next()

    def _begin_next(self) -> None:
        with contact("dense"):
            self._works.append(dist.all_reduce(self._buckets[len(self._works)], group=self._ranks, async_op=True))

    def start(self) -> None:
        """Begin the sums that the backward has not."""
        if self.world.size > 1:
            while len(self._works) < len(self._buckets):
                self._begin_next()

    def finish(self) -> None:
        """Wait for the sums; the parameters' gradients are global from here on."""
        for work in self._works:
            with contact("dense"):
                work.wait()
        self._works.clear()
        self._missing = []
