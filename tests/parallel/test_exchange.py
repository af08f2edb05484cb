"""An exchange between ranks is the permutation that its counts say, however long its messages are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import run_ranks
from turbogr.parallel import exchange
from turbogr.parallel.world import joined


def exchange_at_random(seed: int, piece_bytes: int) -> bool:
    """Exchange rows that say whence and whither, some of them twice at once; return whether all came."""
    exchange._PIECE_BYTES = piece_bytes
    with joined() as world:
        fine = True
        for round_number in range(6):
            counts = np.random.default_rng(seed + round_number).integers(0, 40, (world.size, world.size))
            counts[0, world.size - 1] = 0
            going, coming = counts[world.rank].tolist(), counts[:, world.rank].tolist()
            blocks = [torch.tensor([[world.rank, to, i] for i in range(count)]) for to, count in enumerate(going)]
            sent = torch.cat([block.reshape(-1, 3) for block in blocks]).to(torch.int32)
            wanted = [[whence, world.rank, i] for whence, count in enumerate(coming) for i in range(count)]
            works, results = [], []
            for _ in range(2):
                results.append(torch.full((sum(coming), 3), -1, dtype=torch.int32))
                works.append(exchange.start_exchange(results[-1], sent, coming, going, dist.group.WORLD))
            for work in works:
                work.wait()
            fine &= all(result.tolist() == wanted for result in results)
        return fine


@pytest.mark.parametrize(("size", "piece_bytes"), [(2, 1), (3, 50), (3, 1 << 20)])
def test_rows_come_from_whom_they_should_in_their_order(size: int, piece_bytes: int) -> None:
    assert run_ranks(size, exchange_at_random, 3, piece_bytes) == [True] * size
