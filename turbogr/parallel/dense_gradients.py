"""Data parallelism of the dense parameters: gradients in one flat buffer, summed over ranks during the backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from turbogr.parallel.collective_issuer import issue
from turbogr.parallel.world import World, communicating, new_group

_SMALLEST_BUCKET, _BUCKET_PER_RANK = 4 << 20, 256 << 10


def bucket_bytes_for(size: int) -> int:
    """Return the size in bytes of a bucket for `size` ranks.

    The sum of a small bucket starts early. But a ring all-reduce cuts a bucket into as many messages as there are
    ranks, so buckets grow with the number of ranks; otherwise latency would dominate.
    """
    return max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * size)


class FlatGradients:
    """The gradients of a model as views of one buffer, cut into buckets of about `bucket_bytes` (default:
    `bucket_bytes_for` the world's size).

    Per step: call `attach` before the one backward; the all-reduce of a bucket starts when the backward has filled it,
    always in the same order. `start` starts the remaining ones, and `finish` waits for all. An all-reduce computes an
    element on one rank and sends it to the others, so the sums are equal on all ranks, bit for bit. It uses a process
    group of its own, so other communication may happen at the same time in any order. With one rank nothing is done.

    """

    def __init__(self, model: nn.Module, world: World, bucket_bytes: int | None = None) -> None:
        self.world = world
        bucket_bytes = bucket_bytes or bucket_bytes_for(world.size)
        self._works: list[Any] = []
        self._unfilled: list[int] = []
        """Per bucket, how many parameters' gradients the backward has not computed yet; empty before `attach`."""
        if world.size == 1:
            return
        with communicating():
            self._ranks = new_group()
        # The backward fills gradients from the last layer to the first.
        self._parameters = list(model.parameters())[::-1]
        first = self._parameters[0]
        self._bucket_of: dict[Tensor, int] = {}
        self._num_parameters, lengths = [0], [0]  # per bucket
        for parameter in self._parameters:
            if lengths[-1] * first.element_size() >= bucket_bytes:
                self._num_parameters.append(0)
                lengths.append(0)
            self._num_parameters[-1] += 1
            lengths[-1] += parameter.numel()
            self._bucket_of[parameter] = len(lengths) - 1
        self._flat = torch.zeros(sum(lengths), dtype=first.dtype, device=first.device)
        self._buckets = self._flat.split(lengths)
        own_filled = weakref.WeakMethod(self._filled)

        def filled(parameter: Tensor) -> None:
            if (call := own_filled()) is not None:
                call(parameter)

        # A hook that owned `self` would keep it for ever: Python does not see that the parameters own their hooks.
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(filled)

    def attach(self) -> None:
        """Point the parameters' gradients at the zeroed buffer, for the backward to add to."""
        if self.world.size == 1:
            return
        self._flat.zero_()
        pieces = self._flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        assert not self._works, "call `finish` for the previous step first"
        self._unfilled = list(self._num_parameters)

    def _filled(self, parameter: Tensor) -> None:
        """Start the sums of the buckets that are full, in order."""
        if not self._unfilled:
            return
        bucket = self._bucket_of[parameter]
        self._unfilled[bucket] -= 1
        assert self._unfilled[bucket] >= 0, "a second backward after `attach`: its gradients would not be summed"
        while len(self._works) < len(self._buckets) and not self._unfilled[len(self._works)]:
            self._start_next()

    def _start_next(self) -> None:
        with communicating("dense"):
            bucket, ranks = self._buckets[len(self._works)], self._ranks()
            self._works.append(issue(bucket.device, lambda: dist.all_reduce(bucket, group=ranks, async_op=True)))

    def start(self) -> None:
        """Start the sums that the backward has not started."""
        if self.world.size > 1:
            while len(self._works) < len(self._buckets):
                self._start_next()

    def finish(self) -> None:
        """Wait for the sums; afterwards the parameters' gradients are summed over all ranks."""
        for work in self._works:
            with communicating("dense"):
                work.wait()
        self._works.clear()
        self._unfilled = []
