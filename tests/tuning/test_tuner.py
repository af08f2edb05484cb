"""A search end to end on a tiny log, with real processes, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import turbogr
from tests.forked_training import forked_training
from tests.training.conftest import write_store
from turbogr import cli
from turbogr.config import load_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.tuning import tuner
from turbogr.tuning.tuning_record import TuningRecord

__all__ = ["forked_training"]
pytestmark = pytest.mark.usefixtures("forked_training")

TINY = [
    *(
        "model.dim=16",
        "model.max_len=16",
        "data.batch_size=16",
        "train.epochs=6",
        "evaluate.every=1",
        "train.threads=1",
    ),
    *("evaluate.patience=", "evaluate.baselines=[popularity,skip-markov]"),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_store(tmp_path / "store")


@pytest.fixture
def few_trials(monkeypatch):
    monkeypatch.setattr("turbogr.tuning.search_space.MOST_TRIALS", 3)


def test_a_search_ends_with_a_recipe_a_table_and_a_run(store, tmp_path, few_trials, monkeypatch):
    out, lines = tmp_path / "out", []
    result = turbogr.tune(store.path, minutes=5, out=out, overrides=TINY, report=lines.append)
    record = json.loads((out / "tune.json").read_text())
    assert len(record["trials"]) == 3 and set(record["simple"]) == {"popularity", "skip-markov"}
    assert all(trial["standard_error"] > 0 and trial["seconds"] > 0 for trial in record["trials"])
    reached = [len(trial["values"]) for trial in record["trials"]]
    assert max(reached) == 3 and sorted(reached)[0] == 1, "one goes to the end, others stop early"
    assert result.value == max(trial["newest"] for trial in record["trials"])
    assert "the recipe" in result.table and "± 0." in result.table

    # The kept run is what the recipe trains, to the last digit, and it delivers what is best.
    assert load_config(out / "recipe.yaml").deliver.choose == "best"
    summary = json.loads((out / "best" / "summary.json").read_text())
    assert summary["delivered"] == result.delivered and summary["part"] == "test"
    turbogr.train(out / "recipe.yaml", store.path, tmp_path / "again", overrides=["train.threads=1"])
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["metrics"] == summary["metrics"]
    assert len(turbogr.load(result.run).recommend([1000], k=3)[0]) == 3
    assert not (out / "trials" / "00" / "summary.json").exists(), "trials never see the test items"

    # Once more: everything is there already.
    monkeypatch.setattr(tuner._Search, "_start", lambda *_: pytest.fail("nothing is left to try"))
    assert turbogr.tune(store.path, minutes=5, out=out, overrides=TINY).value == result.value
    with pytest.raises(UserError, match=r"holds a search with other settings \(.*, not .*\); choose another"):
        turbogr.tune(store.path, minutes=5, out=out)


def test_a_killed_search_goes_on_and_the_time_before_counts(store, tmp_path, few_trials):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "turbogr", "tune", str(store.path), "--out", str(out), "--jobs", "1"]
    command += [part for setting in TINY for part in ("--set", setting)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(out.glob("trials/*/metrics.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = TuningRecord.read(out)
    assert before is not None and before.trials and before.seconds > 0
    time.sleep(0.5)  # the trial's process ends with the search
    result = turbogr.tune(store.path, minutes=5, out=out, jobs=1, overrides=TINY)
    after = TuningRecord.read(out)
    assert after is not None and after.seconds > before.seconds and result.run is not None
    assert [trial.name for trial in after.trials] == ["00", "01", "02"]


def test_ctrl_c_ends_with_a_table_and_the_command_to_continue(store, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "turbogr", "tune", str(store.path), "--out", str(out), "--jobs", "1"]
    command += [part for setting in TINY for part in ("--set", setting)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(out.glob("trials/*/metrics.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; continue with: turbogr tune" in said


def test_a_trial_that_fails_is_named_and_the_others_go_on(store, tmp_path, few_trials, monkeypatch):
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\nfrom turbogr.cli import main\n"
        "sys.exit('turbogr: error: no luck') if '/01' in ' '.join(sys.argv) else sys.exit(main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(tuner, "TRAIN", [sys.executable, str(program), "train"])
    result = turbogr.tune(store.path, minutes=5, out=tmp_path / "out", overrides=TINY)
    assert "trial 01 failed: turbogr: error: no luck" in result.notes and result.run is not None


def test_a_short_time_is_kept_and_what_is_missing_is_said(store, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "_LEAST_FINISH", 3.0)
    began = time.monotonic()
    overrides = [*TINY[:3], "train.epochs=100000", *TINY[4:]]
    result = turbogr.tune(store.path, minutes=0.4, out=tmp_path / "out", jobs=1, overrides=overrides)
    assert time.monotonic() - began < 45
    assert any("too short to train the best to its end" in note for note in result.notes)
    assert any("the time ended before all was tried" in note for note in result.notes)
    assert (tmp_path / "out" / "best" / "summary.json").exists()


def test_what_cannot_be_searched_is_refused(store, tmp_path, capsys):
    with pytest.raises(UserError, match=r"model.name is 'ease', whose settings"):
        turbogr.tune(store.path, recipe="ease", out=tmp_path / "a")
    with pytest.raises(UserError, match=r"has no validation items to choose settings by"):
        turbogr.tune(store.path, overrides=["data.split=leave-one-out"], out=tmp_path / "b")
    with pytest.raises(UserError, match=r"minutes.* is 0; give more than 0"):
        turbogr.tune(store.path, minutes=0, out=tmp_path / "c")
    shutil.copytree(store.path, tmp_path / "full")
    assert cli.main(["tune", str(store.path), "--out", str(tmp_path / "full")]) == 2
    assert "is not empty and holds no search" in capsys.readouterr().err


def test_training_pauses_after_an_epoch_and_resumes_to_the_same_weights(store, tmp_path, capsys):
    command = ["train", "quickstart", "--data", str(store.path), "--out", str(tmp_path / "run")]
    command += [part for setting in TINY for part in ("--set", setting)]
    assert cli.main([*command, "--until-epoch", "2"]) == 0
    assert "paused; step" in capsys.readouterr().err and not (tmp_path / "run" / "summary.json").exists()
    assert cli.main([*command, "--resume"]) == 0
    command[5] = str(tmp_path / "whole")
    assert cli.main(command) == 0
    paused, whole = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole"))
    assert paused["model_metrics"] == whole["model_metrics"] and paused["step"] == whole["step"]
