"""A job on torchrun with `--nnodes 1:2` goes on when a machine joins, leaves or disappears, without a person.

Several agents on this machine stand for machines. It takes a minute or more, mostly to start processes, so it runs only
where TURBOGR_TEST_ELASTIC is set; `-s` prints steps lost and seconds to go on (docs/results/reliability.md).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.ranks import free_port
from tests.parallel.training import train_run
from tests.training.test_run import final_tensors
from turbogr.checkpoints import Checkpoints
from turbogr.config import Config, dump_config
from turbogr.data.store import Store

_RENDEZVOUS = "last_call_timeout=2"
_DEADLINE, _STEPS = 600.0, 260


class Machines:
    """Agents of torchrun, each in a session of its own, as on machines of their own."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.arguments, self.log = arguments, log
        self.port, self.agents = free_port(), list[subprocess.Popen[bytes]]()

    def start(self) -> subprocess.Popen[bytes]:
        options = [
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-id", "job"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", _RENDEZVOUS),
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.parallel.elastic_rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/guide/long-runs.md
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                command + self.arguments, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.agents.append(agent)
        return agent

    def stop(self) -> None:
        for agent in self.agents:
            for process in (*_children(agent.pid), agent.pid):
                _kill(process)
            agent.wait()


def _children(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout.split()
    return [int(child) for child in found]


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


class Watch:
    """Looks at the last step in metrics.jsonl again and again: (seconds, step) whenever it has changed."""

    def __init__(self, run: Path, log: Path) -> None:
        self.run, self.log = run, log
        self.seen: list[tuple[float, int]] = []

    def look(self) -> None:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]
        if steps and (not self.seen or steps[-1] != self.seen[-1][1]):
            self.seen.append((time.time(), steps[-1]))

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + _DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"{what}:\n{self.log.read_text(errors='replace')[-5000:]}"
            time.sleep(0.05)
            self.look()

    def wait_for_steps(self, steps: int, size: int, what: str) -> None:
        """Wait until `size` ranks have done so many more steps."""
        done = []

        def is_done() -> bool:
            path = self.run / "environment.json"
            if not done and path.exists() and json.loads(path.read_text())["ranks"]["size"] == size:
                done.append(len(self.seen))
            return bool(done) and len(self.seen) >= done[0] + steps

        self.wait(is_done, what)

    @property
    def lost(self) -> int:
        """How many steps were done and had to be done again."""
        return sum(max(0, before - after) for (_, before), (_, after) in pairwise(self.seen))

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a step between two moments."""
        within = [at for at, _ in self.seen if begin < at < end]
        return max((after - before for before, after in pairwise([begin, *within])), default=0.0)


@pytest.mark.skipif("TURBOGR_TEST_ELASTIC" not in os.environ, reason="TURBOGR_TEST_ELASTIC is not set")
def test_a_job_goes_on_when_machines_join_leave_and_disappear(config: Config, store_path: Path, tmp_path: Path) -> None:
    train = dataclasses.replace(config.train, epochs=None, steps=_STEPS, log_every=1, checkpoint_every=1000)
    config = dataclasses.replace(config, train=train, evaluate=dataclasses.replace(config.evaluate, every=1000))
    run, recipe, log = tmp_path / "run", tmp_path / "recipe.yaml", tmp_path / "log"
    recipe.write_text(dump_config(config))
    train_run(config, store_path, tmp_path / "straight")
    machines = Machines(["train", str(recipe), "--data", str(store_path), "--out", str(run)], log)
    watch = Watch(run, log)
    events: list[tuple[str, float, int, int]] = []

    def note(what: str) -> None:
        events.append((what, time.time(), watch.seen[-1][1], watch.lost))

    try:
        machines.start()
        watch.wait_for_steps(5, 1, "the start")
        note("a machine joins")
        second = machines.start()
        watch.wait_for_steps(5, 2, "the join")
        note("a machine leaves (SIGTERM)")
        second.terminate()
        second.wait()
        watch.wait_for_steps(5, 1, "going on alone")
        note("a machine joins again")
        second = machines.start()
        watch.wait_for_steps(5, 2, "the second join")
        note("a machine disappears (SIGKILL)")
        for process in (*_children(second.pid), second.pid):
            _kill(process)
        watch.wait(lambda: machines.agents[0].poll() is not None, "the end")
        assert machines.agents[0].returncode == 0, log.read_text()
    finally:
        machines.stop()
    ends = [(moment, lost) for _, moment, _, lost in events[1:]] + [(time.time(), watch.lost)]
    for (what, begin, step, lost), (end, lost_then) in zip(events, ends, strict=True):
        gap = watch.longest_gap(begin, end)
        print(f"{what} at step {step}: {lost_then - lost} steps lost, {gap:.1f} s to go on")
    assert watch.lost <= 1, watch.seen
    assert Checkpoints(run).newest() == _STEPS
    ours, theirs = (final_tensors(config, Store.open(store_path), path) for path in (run, tmp_path / "straight"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-4, msg=name)
