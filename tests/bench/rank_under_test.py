"""A rank for the tests of `run_as_ranks`: returns its numbers and the time of an exchange, or fails on request."""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from turbogr.bench._ranks import rank_main
from turbogr.parallel.world import World


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    if world.rank == options.get("fails"):
        raise SystemExit("this rank fails")
    if world.rank == options.get("fails_at_exit"):
        atexit.register(os.abort)
    if world.rank == options.get("hangs_at_exit"):
        atexit.register(time.sleep, 60)
    if world.rank == options.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = 0.0
    if options.get("num_bytes"):
        # From the ranks of the first half to those of the second, each to one.
        message = torch.zeros(options["num_bytes"] // 4)
        for round_bytes in (4, options["num_bytes"]):
            world.barrier()
            started = time.perf_counter()
            if world.rank < world.size // 2:
                dist.send(message[: round_bytes // 4], world.rank + world.size // 2)
            else:
                dist.recv(message[: round_bytes // 4], world.rank - world.size // 2)
            world.barrier()
            seconds = time.perf_counter() - started
    own = {
        "numbers": [world.rank, world.local_rank, world.local_size],
        "network": os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else "",
        "threads": torch.get_num_threads(),
    }
    return {"ranks": world.gather_objects(own), "seconds": seconds}


if __name__ == "__main__":
    rank_main(measure)
