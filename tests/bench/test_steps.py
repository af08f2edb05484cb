from __future__ import annotations

import torch

from turbogr.bench._steps import equal_batch
from turbogr.parallel.world import World


def test_every_rank_has_sequences_of_the_same_lengths_and_items_of_its_own() -> None:
    options = {"lengths": [3, 5], "num_items": 10**6}
    parts = [equal_batch(options, World(rank, 3)) for rank in range(3)]
    for part in parts:
        assert part.items.lengths.tolist() == [3, 5]
        assert part.lengths_of_step.tolist() == [3, 5] * 3
        assert part.targets is not None and part.targets.numel() == 8
    for field in ("events", "users"):
        all_ranks = torch.cat([getattr(part, field) for part in parts])
        assert all_ranks.unique().numel() == all_ranks.numel()
    assert torch.cat([part.items.values for part in parts]).unique().numel() == 24
