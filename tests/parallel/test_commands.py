"""`--ranks` and torchrun from the outside: exit statuses, signals, a rank that is killed, a job that is restarted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from tests.end_to_end.tiny import train_arguments
from tests.parallel.ranks import run_ranks
from turbogr import cli, machine
from turbogr.parallel import launch as launching
from turbogr.parallel.heartbeat import SILENT_RANK_STATUS
from turbogr.parallel.launch import exit_status
from turbogr.runs import load_model

# Rank 1 ends without a message in its first attempt.
CRASHING = """
import os, sys
from turbogr import cli, machine
from turbogr.runs import load_model
from turbogr.training import trainer
machine.gemm_peak = lambda *args, **kwargs: 1e11
original = trainer.Trainer.step
def step(self, batch):
    original(self, batch)
    if self.progress.step == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
trainer.Trainer.step = step
sys.exit(cli.main(sys.argv[1:]))
"""


def _turbogr(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "turbogr", *map(str, arguments)]


def _start_endless(store: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Start two ranks that would train for days and wait until they train."""
    settings = ["--set", "train.epochs=100000", "--set", "evaluate.every=50000", "--set", "parallel.cost=[1, 0]"]
    records = out / "metrics.jsonl"
    before = records.stat().st_size if records.exists() else 0
    process = subprocess.Popen(
        _turbogr(*train_arguments(store, out, "--ranks", 2, *settings, *more)),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not records.exists() or records.stat().st_size <= before:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def _ranks_of(launcher: int) -> dict[int, int]:
    """Return the process of every rank that a launcher has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdigit() else 0
            if parent == launcher:
                variables = (entry / "environ").read_bytes().split(b"\0")
                found.update({int(v[5:]): int(entry.name) for v in variables if v.startswith(b"RANK=")})
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")
def test_signals_reach_all_ranks_and_one_that_is_killed_or_hangs_is_named(store_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = _start_endless(store_path, out)
    ranks = _ranks_of(process.pid)
    assert sorted(ranks) == [0, 1]
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert time.monotonic() - asked < 30
    assert printed.rstrip().endswith("--resume --ranks 2") and "Traceback" not in printed
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert not any(Path(f"/proc/{number}").exists() for number in ranks.values())

    process = _start_endless(store_path, out, "--resume")
    asked = time.monotonic()
    killed = _ranks_of(process.pid)[1]
    os.kill(killed, signal.SIGKILL)
    _, printed = process.communicate(timeout=60)
    assert time.monotonic() - asked < 30
    assert process.returncode == 2, printed
    assert "rank 1 of 2 was killed by SIGKILL" in printed and "Traceback" not in printed
    assert f"rank 0 lost contact with another rank: rank 1 (process {killed} on" in printed

    process = _start_endless(store_path, out, "--resume", "--set", "parallel.timeout=3")
    asked = time.monotonic()
    hanging = _ranks_of(process.pid)[1]
    os.kill(hanging, signal.SIGSTOP)
    assert process.stderr is not None
    first = next(line for line in process.stderr if line.startswith("turbogr:"))
    os.kill(hanging, signal.SIGKILL)  # the launcher would do that after 30 s
    _, printed = process.communicate(timeout=90)
    printed = first + printed
    assert 3 < time.monotonic() - asked < 80
    assert process.returncode == 2, printed
    assert f"rank 1 (process {hanging} on" in printed and "no heartbeat for 3 s" in printed and "--resume" in printed
    assert "Traceback" not in printed and "SIGKILL" not in printed


def test_torchrun_restarts_a_job_from_its_last_checkpoint(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    settings = ["--set", "train.checkpoint_every=2", "--set", "parallel.cost=[1, 0]"]
    # Two agents, as on two machines: only one of them counts the restart.
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "1"]
    command = [*torchrun, str(script), *train_arguments(store_path, tmp_path / "two", *settings)]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = "".join(agent.communicate(timeout=200)[1] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert "resuming after step 5" in printed  # the other machine kept the last step
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    assert cli.main(train_arguments(store_path, tmp_path / "one", *settings)) == 0
    one, two = (load_model(tmp_path / name, "last") for name in ("one", "two"))
    np.testing.assert_allclose(two.tables["item"].numpy(), one.tables["item"].numpy(), rtol=1e-4, atol=1e-5)

    evaluate = ["evaluate", str(tmp_path / "two"), "--json"]
    assert cli.main([*evaluate, str(tmp_path / "one.json")]) == 0
    assert run_ranks(3, cli.main, [*evaluate, str(tmp_path / "three.json")]) == [0, 0, 0]
    assert (tmp_path / "one.json").read_text() == (tmp_path / "three.json").read_text()


def test_the_rendezvous_of_a_machine_cannot_be_reached_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[bool] = []
    interfaces: list[str | None] = []

    def try_to_connect(config: LaunchConfig, entrypoint: str) -> Callable[..., None]:
        parameters = RendezvousParameters(
            config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes
        )
        handler = get_rendezvous_handler(parameters)
        store = handler.next_rendezvous().bootstrap_store_info
        for address in ("127.0.0.1", "127.0.0.2"):  # the second one stands for any other address of this machine
            with socket.socket() as connection:
                reached.append(connection.connect_ex((address, store.master_port)) == 0)
        interfaces.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        return lambda *arguments: None

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(launching, "elastic_launch", try_to_connect)
    assert launching.launch(["doctor"], 2) == 0
    assert reached == [True, False]
    assert interfaces[0] in ("lo", "lo0")


class _Failure:
    def __init__(self, exitcode: int, timestamp: int) -> None:
        self.exitcode, self.timestamp = exitcode, timestamp


def test_the_status_of_a_job_is_that_of_the_rank_that_failed_first() -> None:
    assert exit_status({0: _Failure(2, 20), 1: _Failure(3, 10)}, 2) == 3  # type: ignore[dict-item]
    assert exit_status({0: _Failure(-signal.SIGTERM, 20)}, 1) == 128 + signal.SIGTERM  # type: ignore[dict-item]
    hanging = {0: _Failure(SILENT_RANK_STATUS, 10), 1: _Failure(-signal.SIGKILL, 40)}
    assert exit_status(hanging, 2) == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 1 of 2 was killed by SIGSEGV"):
        exit_status({0: _Failure(2, 10), 1: _Failure(-signal.SIGSEGV, 20)}, 2)  # type: ignore[dict-item]


@pytest.mark.parametrize(("ranks", "printed"), [("0", "--ranks is 0; give at least 1"), ("x", "invalid int value")])
def test_a_wrong_number_of_ranks_is_refused(ranks: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "r.yaml", "--data", "d", "--out", "o", "--ranks", ranks]) == 2
    assert printed in capsys.readouterr().err


def test_a_rank_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["evaluate", "run", "--ranks", "2"]) == 2
    assert "leave --ranks out" in capsys.readouterr().err
