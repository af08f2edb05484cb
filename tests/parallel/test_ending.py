"""A signal ends a rank within seconds, also while it waits in PyTorch for a rank that will never connect."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.parallel.ranks import _context, free_port
from turbogr.parallel import world


def _as_rank(rank: int, port: int, waiting: str, blocked: Callable[[], None]) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as the command line handles it
    if rank == 1:
        setattr(dist, blocked.__name__, lambda *args, **options: time.sleep(100))
    else:
        original = getattr(dist, blocked.__name__)

        def noting(*args: Any, **options: Any) -> Any:
            Path(waiting).touch()
            return original(*args, **options)

        setattr(dist, blocked.__name__, noting)
    with world.connected_world():
        world.new_group()
        time.sleep(100)


@pytest.mark.parametrize("blocked", [dist.init_process_group, dist.new_group], ids=lambda function: function.__name__)
def test_a_rank_that_waits_for_a_lost_one_ends_at_a_signal(blocked: Callable[[], None], tmp_path: Path) -> None:
    waiting, port = tmp_path / "waiting", free_port()
    ranks = [
        _context.Process(target=_as_rank, args=(rank, port, str(waiting), blocked), daemon=True) for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 60
        while not waiting.exists():
            assert time.monotonic() < deadline and ranks[0].is_alive()
            time.sleep(0.05)
        time.sleep(1.0)  # it waits in C++ now
        ranks[0].terminate()
        ranks[0].join(20)
        assert ranks[0].exitcode in (-signal.SIGTERM, 143)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
