"""An all-to-all delivers every row to the rank that its counts name, for messages of any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import run_ranks
from turbogr.parallel import row_exchange
from turbogr.parallel.world import connected_world


def exchange_at_random(seed: int, piece_bytes: int) -> bool:
    """Exchange rows that hold (source, target, number), two exchanges at once; return whether all arrived."""
    row_exchange._PIECE_BYTES = piece_bytes
    with connected_world() as world:
        correct = True
        for round_number in range(6):
            counts = np.random.default_rng(seed + round_number).integers(0, 40, (world.size, world.size))
            counts[0, world.size - 1] = 0
            num_sent, num_received = counts[world.rank].tolist(), counts[:, world.rank].tolist()
            blocks = [
                torch.tensor([[world.rank, target, i] for i in range(count)]) for target, count in enumerate(num_sent)
            ]
            sent = torch.cat([block.reshape(-1, 3) for block in blocks]).to(torch.int32)
            expected = [[source, world.rank, i] for source, count in enumerate(num_received) for i in range(count)]
            works, results = [], []
            for _ in range(2):
                results.append(torch.full((sum(num_received), 3), -1, dtype=torch.int32))
                works.append(row_exchange.start_exchange(results[-1], sent, num_received, num_sent, dist.group.WORLD))
            for work in works:
                work.wait()
            correct &= all(result.tolist() == expected for result in results)
        return correct


@pytest.mark.parametrize(("size", "piece_bytes"), [(2, 1), (3, 50), (3, 1 << 20)])
def test_rows_arrive_from_the_right_rank_in_order(size: int, piece_bytes: int) -> None:
    assert run_ranks(size, exchange_at_random, 3, piece_bytes) == [True] * size
