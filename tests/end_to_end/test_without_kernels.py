"""Without a compiler the package works on the reference operators, and says so once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import turbogr
from tests.end_to_end.tiny import train_arguments


@pytest.fixture
def bare(tmp_path):
    """The package as an installation without a compiler leaves it; returns how to call its command line."""
    package = Path(turbogr.__file__).parent
    shutil.copytree(package, tmp_path / "turbogr", ignore=shutil.ignore_patterns("*.so", "__pycache__"))

    def call(*arguments):
        command = [sys.executable, "-m", "turbogr", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return call


def test_training_works_and_warns_once(bare, store, tmp_path):
    ended = bare(*train_arguments(store, tmp_path / "run", "--set", "train.steps=4"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("warning: running on the slower reference operators") == 1
    backends = json.loads((tmp_path / "run" / "environment.json").read_text())["backends"]
    assert set(backends.values()) == {"reference"}


def test_the_doctor_says_what_is_missing(bare):
    ended = bare("doctor", "--quick")
    assert ended.returncode == 0, ended.stderr
    assert "every operator runs on the slower reference backend" in ended.stdout


def test_asking_for_the_kernels_is_refused_with_the_reason(bare, store, tmp_path):
    ended = bare(*train_arguments(store, tmp_path / "run", "--set", "train.backend=cpu"))
    assert ended.returncode == 2
    assert "not built" in ended.stderr
    assert not (tmp_path / "run").exists()
