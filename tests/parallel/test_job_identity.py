"""A job knows its own run: torchrun's restarts and joining machines resume it, and any other job is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.training import train_run
from turbogr.config import Config
from turbogr.parallel.job_identity import Job, own_part
from turbogr.training.trainer import Trainer

FIRST = Job(("a", "b"), "rank 0 of the first attempt")

# An agent that starts a rank three times, the last time through a shell.
AGENT = """
import os, subprocess, sys
for attempt, command in enumerate(("{rank}", "{rank}", "{rank}; true")):
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "RANK": "0"}
    print(subprocess.run(["sh", "-c", command.format(rank=os.environ["RANK_COMMAND"])], env=environment,
        stdout=subprocess.PIPE, text=True, start_new_session=True).stdout, end="", flush=True)
"""
RANK = "import json; from turbogr.parallel.job_identity import own_part; print(json.dumps(own_part()))"


def test_attempts_of_a_job_have_an_agent_in_common() -> None:
    record = json.loads(json.dumps(FIRST.to_record()))
    assert Job(("b", "c"), "rank 0 of the second").is_restart_of(record), "c has joined and a has left"
    assert not Job(("c", "d"), "rank 0 of the second").is_restart_of(record)
    assert not FIRST.is_restart_of(record), "the same attempt is no restart"
    assert not Job().is_restart_of(Job().to_record()), "no agent, no job"
    assert not any(FIRST.is_restart_of(damaged) for damaged in (None, {}, [], "a", {"agents": None}))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_agent_is_found_above_a_shell_and_every_attempt_is_a_process_of_its_own() -> None:
    command = f"'{sys.executable}' -c '{RANK}'"
    environment = {**os.environ, "RANK_COMMAND": command}
    agents = [
        subprocess.Popen([sys.executable, "-c", AGENT], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    jobs = [[Job.of_ranks([json.loads(line)]) for line in agent.communicate()[0].splitlines()] for agent in agents]
    for (first, second, shell), other in (jobs, jobs[::-1]):
        assert second.is_restart_of(first.to_record()) and shell.is_restart_of(second.to_record())
        assert len({first.attempt, second.attempt, shell.attempt}) == 3
        assert not any(job.is_restart_of(first.to_record()) for job in other)


def test_without_an_agent_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert own_part() == ("", "")


def attempt(
    config: Config, store: Path, out: Path, agents: list[str], restarts: str, lr: float, crash: bool = False
) -> dict[str, Any]:
    """What torchrun's agents, given by rank, start; return how it ended."""
    os.environ.update(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=restarts)
    step = Trainer.step

    def crashing(self: Trainer, batch: Any) -> None:
        step(self, batch)
        if self.progress.step == 5 and crash:
            raise RuntimeError("crashed")

    part = (agents[int(os.environ["RANK"])], f"process {os.getpid()}")
    with (
        mock.patch("turbogr.parallel.world.own_part", create=True, return_value=part),
        mock.patch.object(Trainer, "step", crashing),
    ):
        return train_run(config, store, out, overrides=[f"optimizer.lr={lr}", "train.checkpoint_every=2"])


def test_a_restart_resumes_its_own_run_and_no_other(store_path: Path, tmp_path: Path) -> None:
    from tests.training.conftest import make_config

    def start(agents: list[str], restarts: str, lr: float, crash: bool = False) -> dict[str, Any]:
        options = (agents, restarts, lr, crash)
        ended: dict[str, Any] = run_ranks(2, attempt, make_config(), store_path, tmp_path / "run", *options)[0]
        return ended

    assert start(["a", "b"], "0", 0.005, crash=True)["message"] == "crashed"
    before = (tmp_path / "run/config.yaml").read_bytes(), (tmp_path / "run/run.json").read_bytes()
    refused = start(["c", "d"], "1", 0.5)
    assert refused.get("error") == "UserError", refused
    assert "already exists and was not started by this job; choose another --out" in refused["message"]
    assert "--resume" in refused["message"]
    assert ((tmp_path / "run/config.yaml").read_bytes(), (tmp_path / "run/run.json").read_bytes()) == before
    joined = start(["e", "b"], "0", 0.005)  # a new machine has joined: no agent counts that as a restart
    assert joined.get("status") == "finished", joined
