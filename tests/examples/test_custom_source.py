"""`examples/custom_source.py` runs as it is, and the command line and Python can use its source."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import turbogr
from turbogr.cli import main
from turbogr.errors import UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_source.py"

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.log"
    path.write_text("ann 1700000000 a>b>c\nben 1700000000 b>c>a\nann 1700086400 d>a\n")
    return path


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    metrics = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("hr@", "ndcg@", "mrr")))
    assert float(metrics["hr@10"]) > 0.5, done.stdout
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_the_file(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data"
    command = ["prepare", "sessions", str(log), "--out", str(out), "--plugins", str(EXAMPLE)]
    assert main([*command, "--option", "separator=>", "--option", "seconds_per_item=5"]) == 0
    store = turbogr.Store.open(out)
    assert store.manifest.source == "sessions"
    assert store.user_ids.decode([0, 1]).tolist() == ["ann", "ben"]
    assert store.times[:3].tolist() == [1_700_000_000, 1_700_000_005, 1_700_000_010]
    settings = json.loads((out / "manifest.json").read_text())["settings"]
    assert settings["options"] == {"separator": ">", "seconds_per_item": 5}
    assert settings["plugin"] == {
        "kind": "source",
        "name": "sessions",
        "origin": str(EXAMPLE),
        "sha256": hashlib.sha256(EXAMPLE.read_bytes()).hexdigest(),
    }
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    assert f"source sessions of the plug-in {EXAMPLE}" in capsys.readouterr().out


def test_python_takes_the_file(tmp_path: Path, log: Path) -> None:
    store = turbogr.prepare("sessions", [log], tmp_path / "data", plugins=[EXAMPLE], seconds_per_item=1)
    assert store.num_events == 8
    with pytest.raises(UserError, match="seconds_per_item takes a whole number, got 'many'"):
        turbogr.prepare("sessions", [log], tmp_path / "other", plugins=[EXAMPLE], seconds_per_item="many")
