"""Several processes for a benchmark: a module that runs as every rank of a job, and what its rank 0 returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turbogr.machine import usable_cores
from turbogr.parallel.world import World, joined


def run_as_ranks(module: str, ranks: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m module` as `ranks` processes, one thread and as far as they go one core each; return the result.

    The module must call `serve` when it is run.

    Raises:
        RuntimeError: the processes failed; the message holds the end of what they said.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*torchrun, "-m", module, json.dumps(dict(options)), str(result)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the ranks ended with {done.returncode}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def serve(measure: Callable[[World, dict[str, Any]], dict[str, Any]]) -> None:
    """Be a rank of `run_as_ranks`: stay on one core, measure, and let rank 0 write the result."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    with joined() as world:
        result = measure(world, json.loads(sys.argv[1]))
        if world.is_first:
            Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def ranks_per_core(ranks: int) -> float:
    """Return how many ranks share a core of this machine, at least 1."""
    return max(1.0, ranks / usable_cores())
