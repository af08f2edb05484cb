"""Sums of the dense gradients over the ranks, bucket by bucket, against their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.parallel.ranks import run_ranks
from turbogr.parallel.dense_gradients import FlatGradients
from turbogr.parallel.world import World, connected_world

_SIZES = (7, 300, 1, 20, 512, 3)


class Layers(nn.Module):
    """Layers in a row, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, generator=generator)) for n in _SIZES)
        self.unused = nn.Parameter(torch.ones(5))

    def loss(self, rank: int) -> torch.Tensor:
        total = torch.zeros((), dtype=self.weights[0].dtype)
        for number, weight in enumerate(self.weights):
            total = total + (weight * (rank + number + 1)).sin().sum() + total * weight.sum()
        return total


def sum_gradients(bucket_bytes: int, idle: int) -> dict[str, Any]:
    """Two steps of backward and sum; return the gradients, and how many sums started before the backward's end."""
    with connected_world() as world:
        model = Layers()
        gradients = FlatGradients(model, world, bucket_bytes)
        for _ in range(2):
            gradients.attach()
            if world.rank != idle:
                model.loss(world.rank).backward()
            early = len(gradients._works)
            world.barrier()  # other communication may happen meanwhile
            gradients.start()
            gradients.finish()
        found = [parameter.grad.numpy().copy() for parameter in model.parameters() if parameter.grad is not None]
        return {"gradients": found, "early": early, "buckets": len(gradients._buckets)}


def defined(ranks: list[int]) -> list[np.ndarray[Any, Any]]:
    """Return the sums in double precision."""
    model = Layers().double()
    torch.stack([model.loss(rank) for rank in ranks]).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [grad.numpy() for grad in grads]


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 7), (1200, 3), (1 << 20, 1)])
@pytest.mark.parametrize("idle", [-1, 1])
def test_sums_are_those_of_the_definition_and_equal_on_all_ranks(bucket_bytes: int, buckets: int, idle: int) -> None:
    found = run_ranks(3, sum_gradients, bucket_bytes, idle)
    wanted = defined([rank for rank in range(3) if rank != idle])
    for rank, one in enumerate(found):
        assert one["buckets"] == buckets
        # The unused parameter comes last in the order of the backward and holds its bucket back.
        assert one["early"] == (0 if rank == idle else buckets - 1)
        for mine, first, exact in zip(one["gradients"], found[0]["gradients"], wanted, strict=True):
            np.testing.assert_array_equal(mine, first, err_msg=f"rank {rank}")
            np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=2e-6 * np.abs(exact).max())


def start_early() -> tuple[int, int, str]:
    """Without the unused parameter: sums started in the backward, all sums, and the error of a second backward."""
    with connected_world() as world:
        model = Layers()
        del model.unused
        gradients = FlatGradients(model, world, 1)
        gradients.attach()
        model.loss(world.rank).backward()
        early = len(gradients._works)
        try:
            model.loss(world.rank).backward()
            message = ""
        except AssertionError as error:
            message = str(error)
        gradients.finish()
        return early, len(gradients._buckets), message


def test_sums_start_while_the_backward_runs_and_a_second_one_is_refused() -> None:
    for early, buckets, message in run_ranks(2, start_early):
        assert early == buckets == len(_SIZES)
        assert "second backward" in message


def test_one_rank_keeps_its_gradients() -> None:
    model = Layers()
    gradients = FlatGradients(model, World())
    gradients.attach()
    model.loss(0).backward()
    gradients.start()
    gradients.finish()
    assert model.unused.grad is None
    np.testing.assert_array_equal(model.weights[0].grad.shape, (7,))  # type: ignore[union-attr]
