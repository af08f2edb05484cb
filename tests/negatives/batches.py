"""Small batches for the tests of negatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from turbogr.data.batching import Batch
from turbogr.jagged import Jagged


def make_batch(lengths: Sequence[int], num_items: int, seed: int = 0) -> Batch:
    """Sequences of `lengths` with random items and targets; events count from 100."""
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    items, targets = (torch.randint(0, num_items, (total,), generator=random) for _ in range(2))
    times = torch.arange(total)
    return Batch(
        users=torch.arange(len(lengths)),
        items=Jagged.from_lengths(items, torch.tensor(lengths, dtype=torch.int64)),
        events=torch.arange(total) + 100,
        times=times,
        next_times=times + 1,
        targets=targets,
    )


def part_of(batch: Batch, sequences: Sequence[int]) -> tuple[Batch, torch.Tensor]:
    """The part of a batch that one of several ranks has, and the places of its tokens in the whole."""
    assert batch.targets is not None
    offsets = batch.items.offsets
    chosen = torch.cat([torch.arange(int(offsets[s]), int(offsets[s + 1])) for s in sequences])
    lengths = batch.items.lengths[torch.tensor(list(sequences))]
    part = dataclasses.replace(
        batch,
        users=batch.users[torch.tensor(list(sequences))],
        items=Jagged.from_lengths(batch.items.values[chosen], lengths),
        events=batch.events[chosen],
        times=batch.times[chosen],
        next_times=batch.next_times[chosen],
        targets=batch.targets[chosen],
        step_lengths=batch.items.lengths,
        step_targets=batch.targets,
    )
    return part, chosen
