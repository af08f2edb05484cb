"""A few faults of each kind that this machine allows, and what the record says of jobs that are not as they must be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from turbogr import cli
from turbogr.chaos import verdict
from turbogr.chaos.fault_plan import KINDS, JobPlan, plan_job
from turbogr.chaos.rank_task import Board
from turbogr.chaos.surroundings import NEEDS, way_in
from turbogr.commands import chaos as command


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "turbogr", "chaos", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_nothing_is_lost_by_a_fault_of_each_kind(tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind not in NEEDS or way_in() is not None]
    record = tmp_path / "chaos.json"
    with start("--faults", len(kinds), "--ranks", 2, "--kinds", ",".join(kinds), "--json", record) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    found = json.loads(record.read_text())
    assert {name: found[name] for name in ("lost_steps", "different_weights", "hangs", "problems")} == {
        "lost_steps": 0,
        "different_weights": 0,
        "hangs": 0,
        "problems": [],
    }
    assert found["by_kind"] == dict.fromkeys(sorted(kinds), 1) and found["faults"] == len(kinds)
    assert found["num_lives"] >= 3, "kill, stop and disk each end a life"
    assert list(tmp_path.iterdir()) == [record]


def test_an_interrupted_command_leaves_nothing_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    record = tmp_path / "record" / "chaos.json"
    partial = record.with_name("chaos.json.partial")
    arguments = ("--faults", 2, "--kinds", "kill", "--steps", 10, "--ranks", 2, "--json", record)
    with start(*arguments) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("turbogr-chaos-*/job-0/trajectory-0.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in err
    assert not list(tmp_path.glob("turbogr-chaos-*")), "the folder of the jobs"
    partial.write_text(json.dumps({"identity": {}, "machine": {}, "jobs": []}))
    with start(*arguments) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "an interrupted command with other options" in err


def plan(number: int = 3, seed: int = 5, **wanted: int) -> JobPlan:
    return plan_job(seed, number, wanted or dict.fromkeys(KINDS, 4), ranks=(2, 3, 4), num_steps=40)


def test_a_plan_is_a_function_of_the_seed_and_the_job() -> None:
    assert plan() == plan() and plan() != plan(number=4) and plan() != plan(seed=6)
    for number in range(30):
        faults = plan(number).faults
        assert 0 < len(faults) <= 6 and all(fault.kind in KINDS for fault in faults)
        assert all(0 <= rank < plan(number).ranks for fault in faults for rank in fault.ranks)
        assert len(plan(number).bad_steps) == len(set(plan(number).bad_steps))
    assert Counter(fault.kind for fault in plan(kill=2, nan=1).faults) == {"kill": 2, "nan": 1}
    assert set(command._KINDS) == set(KINDS)


def write_trajectory(folder: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = folder / f"trajectory-{name}0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def step(life: int, number: int, *samples: int) -> dict[str, Any]:
    return {"life": life, "step": number, "samples": [[sample, 5] for sample in samples]}


def test_the_final_trajectory_is_that_of_the_last_life_that_made_a_step(tmp_path: Path) -> None:
    lines = [{"life": 1, "begun_with": 0}, step(1, 1, 10), step(1, 2, 20), step(1, 3, 30), step(1, 2, 21)]
    lines += [{"life": 2, "begun_with": 3}]  # killed before its first step
    lines += [{"life": 3, "begun_with": 2}, step(3, 3, 31), step(3, 4, 40)]
    found = verdict.final_trajectory(write_trajectory(tmp_path, "", lines), 4)
    assert found == {1: [(10, 5)], 2: [(21, 5)], 3: [(31, 5)], 4: [(40, 5)]}


def write_run(run: Path, weights: bytes, value: float) -> Path:
    checkpoint = run / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "part-0.safetensors").write_bytes(weights)
    (checkpoint / "progress.json").write_text('{"skipped_steps": []}')
    record = {"kind": "eval", "step": 2, "elapsed": value, "hr@10": value}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return run


def test_other_bits_samples_and_metrics_are_noticed(tmp_path: Path) -> None:
    job = JobPlan(0, 1, 2, {}, ())
    begun = {"life": 1, "begun_with": 0}
    ours, theirs = write_run(tmp_path / "a", b"abc", 0.5), write_run(tmp_path / "b", b"abc", 0.5)
    lines = [begun, step(1, 1, 10, 11), step(1, 2, 20)]
    write_trajectory(tmp_path, "", lines)
    write_trajectory(tmp_path, "undisturbed-", lines)
    assert verdict.compare(job, ours, theirs, tmp_path) == verdict.Verdict([], 0, False, [])
    write_trajectory(tmp_path, "", [begun, step(1, 1, 10), step(1, 2, 20, 11)])
    other = write_run(tmp_path / "c", b"abd", 0.6)
    assert verdict.compare(job, other, theirs, tmp_path) == verdict.Verdict(["part-0.safetensors"], 2, True, [])
    (other / "checkpoints" / "step-2" / "part-0.safetensors").unlink()
    assert verdict.compare(job, other, theirs, tmp_path).different == ["part-0.safetensors"]


def test_the_board_shows_every_rank(tmp_path: Path) -> None:
    ours = Board(str(tmp_path / "board"), 2, new=True)
    theirs = Board(str(tmp_path / "board"), 2)
    assert (ours.steps(1), ours.begun_with(1)) == (-1, -1)
    theirs.write(1, 7, 5)
    theirs.write(1, 8)
    assert (ours.steps(1), ours.begun_with(1), ours.steps(0)) == (8, 5, -1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "0"], "--faults is 0"),
        (["--kinds", "kill,fire"], "--kinds names fire; choose from kill, stop, disk, link, nan"),
        (["--ranks", "1"], "--ranks is 1; give 2 to 8"),
        (["--steps", "3"], "--steps is 3"),
    ],
)
def test_options_are_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_kinds_that_need_surroundings_are_refused_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("turbogr.chaos.surroundings.way_in", lambda: None)
    monkeypatch.delenv("TURBOGR_CHAOS_INSIDE", raising=False)
    assert cli.main(["chaos", "--kinds", "kill,disk"]) == 2
    assert "leave these kinds out: --kinds kill" in capsys.readouterr().err
