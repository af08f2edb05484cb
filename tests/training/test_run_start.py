"""The run folder around training: leftovers, locks, what is on disk when, and what of other releases is read."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.files import atomic_file
from turbogr.progress import Progress
from turbogr.runs import load_model
from turbogr.training import run_start
from turbogr.training.run import train
from turbogr.training.trainer import Trainer


def test_the_error_that_ended_a_run_is_reported_even_if_its_record_cannot_be_written(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer) -> None:
        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device", "run.json")

        monkeypatch.setattr(run_start, "replace_text", full)
        raise UserError("the cause")

    monkeypatch.setattr(Trainer, "fit", fail)
    with pytest.raises(UserError, match="the cause"):
        train(config, store.path, tmp_path / "run")


def test_what_killed_writers_left_is_removed_at_the_next_start(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, store.path, run)
    left = [run / "checkpoints/.best.json.ab12_xyz.part", run / "checkpoints/step-12/.progress.json.00ff00ff.part"]
    left += [run / ".run.json.0123abcd.part", run / "positions/.test-step-4.npz.0123abcd.part"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{")
    with atomic_file(run / "report.html") as written:  # by a process that still runs
        train(config, store.path, run, resume=True)
        assert written.exists()
    assert not any(path.exists() for path in left)


def test_a_step_has_one_epoch_number(config: Config, store: Store, tmp_path: Path) -> None:
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=6))
    train(config, store.path, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.note_best(dataclasses.replace(checkpoints.progress(6), best_step=6, best_epoch=1.5))
    best, last = (load_model(tmp_path / "run", which).checkpoint for which in ("best", "last"))
    assert (best.step, best.epoch, best.which) == (6, 1.5, "best")
    assert (last.step, last.epoch, last.which) == (6, 1.5, "last")


def test_the_progress_of_earlier_releases_is_read_and_that_of_later_ones_is_refused(
    config: Config, store: Store, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(config, store.path, run)
    path = run / "checkpoints/step-12/progress.json"
    written = json.loads(path.read_text())
    assert written.pop("version") == 2
    del written["crc32"]
    path.write_text(json.dumps(written))
    assert train(config, store.path, run, resume=True).step == 12
    path.write_text(json.dumps({**written, "version": 3, "something_new": 1}))
    before = (run / "config.yaml").read_bytes(), (run / "run.json").read_bytes()
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4))
    with pytest.raises(
        UserError, match=r"step-12 was written by a later release.*version 3.*up to 2\); update turbogr"
    ):
        train(longer, store.path, run, resume=True)
    assert ((run / "config.yaml").read_bytes(), (run / "run.json").read_bytes()) == before


def test_a_checkpoint_and_its_name_are_on_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    rename, fsync = os.rename, os.fsync

    def renamed(old: Path, new: Path) -> None:
        if Path(old).is_dir():
            steps.append(f"rename to {Path(new).name}")
        rename(old, new)

    def flushed(handle: int) -> None:
        found = [folder for folder in tmp_path.rglob("*") if folder.is_dir()]
        steps.extend(f"flush {f.name}" for f in found if os.path.samestat(f.stat(), os.fstat(handle)))
        fsync(handle)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", flushed)
    Checkpoints(tmp_path / "run").save({"model": {"w": torch.zeros(2)}}, Progress(step=3, best_step=3))
    assert steps == [
        *("flush .step-3.part", "rename to step-3", "flush run", "flush checkpoints"),
        "flush checkpoints",  # and the name of best.json
    ]


@pytest.mark.parametrize("files_can_be_locked", [True, False])
def test_a_file_system_without_locks_on_folders(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_can_be_locked: bool
) -> None:
    flock = fcntl.flock

    def like_nfs(handle: int, operation: int) -> None:
        if not files_can_be_locked or stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(9, "Bad file descriptor")
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", like_nfs)
    run = tmp_path / "run"
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        assert train(config, store.path, run).status == "finished"
    assert any("has no locks" in str(note.message) for note in noted) is not files_can_be_locked
    if files_can_be_locked:
        handle = os.open(run / ".lock", os.O_RDWR)
        flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is training"):
            train(config, store.path, run, resume=True)
        os.close(handle)
    assert train(config, store.path, run, resume=True).status == "finished"
