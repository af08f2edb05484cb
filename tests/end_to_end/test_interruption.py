"""A run that is interrupted anywhere and resumed ends as if nothing had happened: same weights, same metrics."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.end_to_end.tiny import train_arguments
from turbogr import cli
from turbogr.training import trainer

# What the clock decides, not the training.
TIMES = {
    *("elapsed", "evaluation_seconds", "tokens_per_second", "sequences_per_second", "mfu_strict", "mfu_nominal"),
    *("compute_share", "exposed_sparse_share", "exposed_dense_share", "idle_share"),
}

KILL_AT_STEP = """
import os, signal, sys
from turbogr import cli, machine
from turbogr import checkpoint_writer as checkpoint
from turbogr.training import trainer
machine.gemm_peak = lambda *args, **kwargs: 1e11
{patch}
sys.exit(cli.main(sys.argv[1:]))
"""


def final_state(run):
    """The bytes of the last checkpoint, the best step and the metrics without times."""
    checkpoints = run / "checkpoints"
    last = max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=None)
    tensors = {path.name: path.read_bytes() for path in (checkpoints / f"step-{last}").glob("*.safetensors")}
    assert tensors
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in record.items() if key not in TIMES} for record in records]
    return last, tensors, (checkpoints / "best.json").read_text(), metrics


def leftovers(run):
    return [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def interrupt(monkeypatch, method, number, count):
    """Send ourselves a signal during the `count`-th call of a method of the trainer."""
    original = getattr(trainer.Trainer, method)
    calls = []

    def wrapped(self, *args):
        calls.append(None)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return original(self, *args)

    monkeypatch.setattr(trainer.Trainer, method, wrapped)


@pytest.mark.parametrize(
    ("method", "count", "number"),
    [
        ("step", 1, signal.SIGTERM),
        ("step", 4, signal.SIGINT),
        ("step", 8, signal.SIGTERM),  # the last of its epoch
        ("step", 9, signal.SIGINT),
        ("_evaluate", 1, signal.SIGTERM),
        ("_evaluate", 2, signal.SIGINT),
    ],
)
def test_a_signal_and_resume(turbogr, monkeypatch, store, run, tmp_path, number, method, count):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, method, number, count)
        status, _, err = turbogr(*train_arguments(store, out))
    assert status == 128 + number, err
    assert "--resume" in err
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert not leftovers(out)
    status, _, err = turbogr(*train_arguments(store, out, "--resume"))
    assert status == 0, err
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert final_state(out) == final_state(run)


def test_interrupted_again_and_again(turbogr, monkeypatch, store, run, tmp_path):
    out = tmp_path / "run"
    for _ in range(50):
        with monkeypatch.context() as patch:
            interrupt(patch, "step", signal.SIGTERM, 3)
            status, _, err = turbogr(*train_arguments(store, out, "--resume"))
        if status == 0:
            break
        assert status == 128 + signal.SIGTERM, err
    assert final_state(out) == final_state(run)


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(
            "original = trainer.Trainer.step\n"
            "def step(self, batch):\n"
            "    original(self, batch)\n"
            "    if self.progress.step == 11: os.kill(os.getpid(), signal.SIGKILL)\n"
            "trainer.Trainer.step = step",
            id="in a step",
        ),
        pytest.param(
            "original = checkpoint.write_part\n"
            "def write(parts, folder, *numbers):\n"
            "    original(parts, folder, *numbers)\n"
            "    if 'step-12' in folder.name: os.kill(os.getpid(), signal.SIGKILL)\n"
            "checkpoint.write_part = write",
            id="in a save",
        ),
    ],
)
def test_killed_without_warning(turbogr, store, run, tmp_path, patch):
    out = tmp_path / "run"
    every = ["--set", "train.checkpoint_every=4"]
    code = KILL_AT_STEP.format(patch=patch)
    ended = subprocess.run(
        [sys.executable, "-c", code, *train_arguments(store, out, *every)], capture_output=True, text=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    status, _, err = turbogr(*train_arguments(store, out, "--resume", *every))
    assert status == 0, err
    assert "resuming after step 8" in err
    assert final_state(out) == final_state(run)
    assert not leftovers(out)


@pytest.mark.parametrize("mode", ["semi_async", "exact_overlap"])
def test_killed_at_a_random_moment_with_batches_in_flight(turbogr, store, tmp_path, mode):
    options = ["--set", f"pipeline.mode={mode}", "--set", "train.checkpoint_every=3", "--set", "train.epochs=12"]
    assert turbogr(*train_arguments(store, tmp_path / "straight", *options))[0] == 0
    out = tmp_path / "killed"
    with subprocess.Popen(
        [sys.executable, "-m", "turbogr", *train_arguments(store, out, *options)], stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob("checkpoints/step-*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.3))
        process.kill()
    assert turbogr(*train_arguments(store, out, "--resume", *options))[0] == 0
    assert final_state(out) == final_state(tmp_path / "straight")
    assert not leftovers(out)


def test_a_real_process_ends_within_seconds(store, tmp_path):
    out = tmp_path / "run"
    arguments = train_arguments(store, out, "--set", "train.epochs=100000", "--set", "evaluate.every=50000")
    with subprocess.Popen(
        [sys.executable, "-m", "turbogr", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - asked < 30
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert "turbogr train" in err
    assert "--resume" in err


def test_a_finished_run_stays_as_it_is(turbogr, store, run):
    before = final_state(run)
    status, _, err = turbogr(*train_arguments(store, run, "--resume"))
    assert status == 0, err
    assert final_state(run) == before


def test_a_run_starts_again_from_its_own_config(turbogr, store, run, tmp_path):
    status, _, err = turbogr("train", run / "config.yaml", "--data", store, "--out", tmp_path / "again")
    assert status == 0, err
    assert final_state(tmp_path / "again") == final_state(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_preparing_leaves_nothing(tmp_path, number):
    out = tmp_path / "data"
    arguments = ["prepare", "synthetic", "--out", str(out), "--num-users", "2000000"]
    with subprocess.Popen(
        [sys.executable, "-m", "turbogr", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not any(path.is_file() and path.stat().st_size for path in tmp_path.rglob("*")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_evaluating_twice_gives_the_same(turbogr, run, tmp_path):
    for name in ("a.json", "b.json"):
        assert turbogr("evaluate", run, "--json", tmp_path / name)[0] == 0
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["parts"] == second["parts"]


def test_the_command_line_is_usable_from_a_thread(store, tmp_path):
    # signals cannot be caught there; the run must work all the same
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(cli.main(train_arguments(store, tmp_path / "run"))))
    thread.start()
    thread.join()
    assert statuses == [0]
