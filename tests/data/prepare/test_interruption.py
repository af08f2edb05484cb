"""Whatever ends a prepare, the target holds the old store or the new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.logs import random_events, stored_sequences, write_csv
from turbogr.data.prepare.preparation import prepare
from turbogr.data.store import Store

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_any_moment(tmp_path: Path, exchange: bool) -> None:
    write_csv(tmp_path / "old.csv", random_events(30, 4, 5, seed=0))
    write_csv(tmp_path / "new.csv", random_events(30, 4, 5, seed=1))
    prepare("csv", [tmp_path / "old.csv"], tmp_path / "store")
    script = [sys.executable, "-m", "tests.data.prepare.killed", str(tmp_path), *([] if exchange else ["no-exchange"])]
    result = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    deaths = [line.split() for line in result.stdout.splitlines()]
    held = [state for state, _ in deaths]
    assert deaths[-1] == ["new", "done"]
    assert len(deaths) > 40, "too few acts on the file system were interrupted"
    first_new = held.index("new")
    assert set(held[:first_new]) == ({"old"} if exchange else {"old", "aside"})
    assert set(held[first_new:]) == {"new"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.csv", "old.csv", "store"]
    expected = prepare("csv", [tmp_path / "new.csv"], tmp_path / "again")
    assert stored_sequences(Store.open(tmp_path / "store")) == stored_sequences(expected)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_within_seconds_and_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    command = [
        sys.executable,
        "-m",
        "turbogr",
        "prepare",
        "synthetic",
        "--preset",
        "kuairand-27k",
        "--num-users",
        "1000",
    ]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".store.partial-*/scratch/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
