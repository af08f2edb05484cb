"""Every mistake gets one clear sentence and a non-zero status, and leaves the disk as it was."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from tests.end_to_end.tiny import RECIPE, TINY, train_arguments

GOOD = "user_id,item_id,timestamp\n" + "".join(
    f"u{user},i{(user + step) % 7},{1_600_000_000 + 60 * step}\n" for user in range(6) for step in range(5)
)


@pytest.fixture
def refused(turbogr, tmp_path):
    """Run a command that must fail with these words, changing nothing on disk."""

    def check(arguments, *words):
        before = listing(tmp_path)
        status, _, err = turbogr(*arguments)
        errors = [line for line in err.splitlines() if line.startswith("turbogr: error: ")]
        assert status == 2, err
        assert len(errors) == 1, err
        assert "Traceback" not in err
        for word in words:
            assert word.lower() in errors[0].lower()
        assert listing(tmp_path) == before

    return check


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def log(tmp_path):
    def write(text, name="log.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_good_log_is_good(turbogr, log, tmp_path):
    assert turbogr("prepare", "csv", log(GOOD), "--out", tmp_path / "data")[0] == 0


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        pytest.param(GOOD, ["--user-column", "usr_id"], ["usr_id", "'user_id'"], id="misspelt column"),
        pytest.param(GOOD.replace("item_id", "colour"), [], ["item", "colour"], id="missing column"),
        pytest.param(GOOD.replace("1600000060", "yesterday", 1), [], ["timestamp", "yesterday"], id="text for a time"),
        pytest.param(GOOD.replace("1600000060", "-5", 1), [], ["timestamp", "-5"], id="negative time"),
        pytest.param(GOOD.replace("1600000060", "", 1), [], ["timestamp", "line 3"], id="missing time"),
        pytest.param("", [], ["empty"], id="empty file"),
        pytest.param("user_id,item_id,timestamp\n", [], ["no records"], id="header alone"),
        pytest.param("user_id,item_id,timestamp\nu,a,1\nu,b,2\n", [], ["a single user"], id="one user"),
        pytest.param("user_id,item_id,timestamp\nu,a,1\nv,a,2\n", [], ["a single item"], id="one item"),
        pytest.param(GOOD, ["--split", "leave-one-uot"], ["leave-one-uot", "leave-one-out"], id="misspelt split"),
        pytest.param(GOOD, ["--keep-columns", "rating"], ["rating"], id="missing action column"),
    ],
)
def test_a_bad_log(refused, log, tmp_path, text, options, words):
    refused(["prepare", "csv", log(text), "--out", tmp_path / "data", *options], *words)


def test_a_missing_file(refused, tmp_path):
    refused(["prepare", "csv", tmp_path / "no.csv", "--out", tmp_path / "data"], "no.csv")


def test_an_unknown_source(refused, tmp_path):
    refused(["prepare", "cvs", "--out", tmp_path / "data"], "cvs", "'csv'")


def test_a_parquet_file_that_is_none(refused, log, tmp_path):
    refused(["prepare", "parquet", log(GOOD, "log.parquet"), "--out", tmp_path / "data"], "log.parquet")


def test_a_store_that_exists(refused, store, tmp_path):
    shutil.copytree(store, tmp_path / "data")
    refused(["prepare", "synthetic", "--out", tmp_path / "data"], "data", "exists", "--overwrite")


def test_a_folder_that_is_no_store(refused, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("keep")
    for more in ([], ["--overwrite"]):
        refused(["prepare", "synthetic", "--out", tmp_path / "data", *more], "data")


def test_no_store(refused, tmp_path):
    refused(train_arguments(tmp_path / "nowhere", tmp_path / "run"), "nowhere", "turbogr prepare")


def test_a_store_of_another_version(refused, store, tmp_path):
    shutil.copytree(store, tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    refused(train_arguments(tmp_path / "data", tmp_path / "run"), "version 99", "prepare")


def test_a_store_that_was_cut_short(refused, store, tmp_path):
    shutil.copytree(store, tmp_path / "data")
    items = tmp_path / "data" / "items.npy"
    items.write_bytes(items.read_bytes()[:-8])
    refused(train_arguments(tmp_path / "data", tmp_path / "run"), "items")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epoch=3", ["'train.epoch'", "'train.epochs'"]),
        ("trian.epochs=3", ["'trian.epochs'", "'train.epochs'"]),
        ("optimizer.lr=fast", ["lr", "'fast'"]),
        ("model.dim=-4", ["model.dim must be positive"]),
        ("train.device=gpu7", ["train.device", "gpu7", "cpu"]),
        ("data.split=leave-none", ["leave-none"]),
        ("train.backend=cqu", ["cqu", "'cpu'"]),
    ],
)
def test_a_bad_setting(refused, store, tmp_path, setting, words):
    refused(train_arguments(store, tmp_path / "run", "--set", setting), *words)


def test_a_missing_recipe(refused, store, tmp_path):
    refused(["train", tmp_path / "no.yaml", "--data", store, "--out", tmp_path / "run"], "no.yaml")


def test_a_run_folder_that_exists(refused, store, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    refused(train_arguments(store, tmp_path / "run"), "already exists", "--resume")


def test_a_file_where_the_run_folder_should_be(refused, store, tmp_path):
    (tmp_path / "run").write_text("mine")
    for more in ([], ["--resume"]):
        refused(train_arguments(store, tmp_path / "run", *more), "run")


def test_resuming_something_else(refused, store, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    refused(
        train_arguments(store, tmp_path / "run", "--resume", "--set", "model.num_blocks=3"), "model.num_blocks", "=2"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    refused(train_arguments(store, tmp_path / "other", "--resume"), "other")


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_no_run(refused, tmp_path, command):
    refused([command, tmp_path / "nowhere"], "nowhere")


def test_recommendations_to_nowhere(refused, run, tmp_path):
    refused(["recommend", tmp_path / "nowhere", "--out", tmp_path / "out.csv"], "nowhere")
    refused(["recommend", run, "--out", tmp_path / "out.txt"], "out.txt", ".csv", ".parquet", ".jsonl")
    refused(["recommend", run, "--k", 0, "--out", tmp_path / "out.csv"], "0")
    refused(["recommend", run, "--users", tmp_path / "no.txt", "--out", tmp_path / "out.csv"], "no.txt")


def limited(limit, *arguments):
    """Run the command where no file may grow beyond `limit` bytes: for the writer, a full disk."""

    def restrict():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "turbogr", *map(str, arguments)], capture_output=True, text=True, preexec_fn=restrict
    )


def test_a_full_disk_while_preparing(tmp_path):
    ended = limited(20_000, "prepare", "synthetic", "--out", tmp_path / "data", "--num-users", 2000)
    assert ended.returncode == 2, ended.stderr
    assert "turbogr: error: " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert listing(tmp_path) == {}


def test_a_full_disk_while_training_leaves_a_run_that_resumes(turbogr, store, run, tmp_path):
    settings = [part for value in TINY for part in ("--set", value)]
    ended = limited(20_000, "train", RECIPE, "--data", store, "--out", tmp_path / "run", *settings)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [path for path in (tmp_path / "run" / "checkpoints").glob("*") if path.name.startswith("step-")]
    status, _, err = turbogr(*train_arguments(store, tmp_path / "run", "--resume"))
    assert status == 0, err
    assert listing(tmp_path / "run").keys() == listing(run).keys()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(refused, store, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    refused(["prepare", "synthetic", "--out", locked / "data"], "permission denied", "locked")
    refused(train_arguments(store, locked / "run"), "permission denied", "locked")


def test_few_users_are_pointed_out_when_training(turbogr, log, tmp_path):
    turbogr("prepare", "csv", log(GOOD), "--out", tmp_path / "data")
    _, _, err = turbogr(*train_arguments(tmp_path / "data", tmp_path / "run"))
    assert "only 6 users have a test item, so metrics mean nothing" in err
