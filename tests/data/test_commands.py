from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.logs import random_events, write_csv
from tests.own_registry import own_registry  # noqa: F401
from turbogr.cli import main
from turbogr.data.prepare.preparation import prepare
from turbogr.data.prepare.source import OF_TEXT_FILES, Source
from turbogr.data.prepare.source_lookup import built_in_sources
from turbogr.data.store import Store
from turbogr.data.store_summary import Distribution, summarise

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    events = [(u, i, 1_600_000_000 + t) for u, i, t in random_events(300, 12, 20, seed=6)]
    return write_csv(tmp_path / "log.csv", events)


def test_the_help_of_prepare_lists_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {source.name} " in shown for source in built_in_sources())
    assert "--user-column NAME" not in shown and "turbogr prepare csv --help" in shown


@pytest.mark.parametrize("source", built_in_sources(), ids=lambda source: source.name)
def test_the_help_of_a_source_has_what_concerns_it(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", source.name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: turbogr prepare {source.name} " in shown and "--out DIR" in shown and "--min-user-events" in shown
    every = {*OF_TEXT_FILES, *(name for other in built_in_sources() for name in other.own_names), "log"}
    takes = {*source.takes, *source.own_names, *(["log"] if source.name == "synthetic" else [])}
    listed = {name for name in every if f"\n  --{name.replace('_', '-')} " in f"{shown} "}
    assert listed == takes
    assert "--plugins" not in shown


def test_the_help_of_an_unknown_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "cvs", "--help"]) == 2
    assert "Did you mean 'csv'" in capsys.readouterr().err


@pytest.mark.usefixtures("own_registry")
def test_the_help_of_a_source_of_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parents[2] / "examples" / "custom_source.py"
    assert main(["prepare", "sessions", "--plugins", str(source), "--help"]) == 0
    assert "--option KEY=VALUE: separator, seconds_per_item" in capsys.readouterr().out


def test_prepare_ends_with_the_account(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "store"
    assert (
        main(["prepare", "csv", str(log), "--out", str(out), "--min-item-events", "12", "--split", "leave-one-out"])
        == 0
    )
    store = Store.open(out)
    lines = [line.rsplit(None, 1) for line in capsys.readouterr().out.splitlines()]
    account = {label: int(count.replace(",", "")) for label, count in lines[1:4]}
    assert account["records in"] == 300
    assert account["records kept"] == store.num_events
    assert account["records in"] + account["dropped: item with fewer than 12 events"] == store.num_events < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["csv", "LOG", "--item-column", "itm"], "no column 'itm'"),
        (["csv", "LOG", "--num-users", "5"], "--num-users is not an option of the source 'csv'"),
        (["csv", "LOG", "--log", "x"], "--log is not an option of the source 'csv'"),
        (["csv", "LOG", "--time-unit", "weeks"], "--time-unit"),
        (["csv", "LOG", "--spilt", "x"], "--split"),
        (["cvs", "LOG"], "Did you mean 'csv'"),
        (["LOG"], "is a path, and the kind of input comes first: turbogr prepare csv "),
        (["logs/day.parquet"], "turbogr prepare parquet logs/day.parquet --out DIR"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    tmp_path: Path, log: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(log) if argument == "LOG" else argument for argument in arguments]
    assert main(["prepare", *given, "--out", str(tmp_path / "store")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]


def test_the_synthetic_log_is_written_on_demand(tmp_path: Path) -> None:
    arguments = ["prepare", "synthetic", "--num-users", "20", "--out", str(tmp_path / "a")]
    assert main([*arguments, "--log", str(tmp_path / "log.parquet")]) == 0
    assert main(["prepare", "parquet", str(tmp_path / "log.parquet"), "--out", str(tmp_path / "b")]) == 0
    first, second = Store.open(tmp_path / "a").manifest, Store.open(tmp_path / "b").manifest
    assert first.content_hash == second.content_hash


def test_preparing_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import sys, turbogr\n"
        "turbogr.prepare('synthetic', [], sys.argv[1], num_users=20)\n"
        "assert 'torch' not in sys.modules, 'importing torch takes a second, which preparing need not'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True)


def test_inspect_shows_the_store(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prepare", "csv", str(log), "--out", str(tmp_path / "store"), "--keep-columns", "timestamp"])
    capsys.readouterr()
    report = tmp_path / "report.json"
    assert main(["inspect", str(tmp_path / "store"), "--users", "2", "--json", str(report)]) == 0
    text = capsys.readouterr().out
    assert "12 users (integer ids)" in text
    assert "300 events" in text
    assert "timestamp (int32)" in text
    assert "2020-09-13" in text
    assert text.count("\n  user ") == 2
    assert text.rstrip().endswith("300")
    record = json.loads(report.read_text())
    assert record["manifest"]["num_events"] == 300
    assert sum(number for *_, number in record["lengths"]["bins"]) == 12
    assert sum(record["over_time"]) == 300


def test_inspect_of_positions_and_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_text("1 2\n1 3\n2 3\n2 2\n")
    main(["prepare", "sasrec", str(tmp_path / "log.txt"), "--out", str(tmp_path / "store")])
    assert main(["inspect", str(tmp_path / "store")]) == 0
    assert "positions" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 2
    assert "not a prepared store" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert main(["inspect", str(tmp_path / "store"), "--json", str(tmp_path / "pipe")]) == 2
    out, err = capsys.readouterr()
    assert not out, "it is refused before the store is read"
    assert "is a pipe" in err


def test_distributions() -> None:
    import numpy as np

    distribution = Distribution.of(np.array([0, 1, 1, 2, 3, 4, 100]))
    assert distribution.bins == (
        (0, 0, 1),
        (1, 1, 2),
        (2, 3, 2),
        (4, 7, 1),
        (8, 15, 0),
        (16, 31, 0),
        (32, 63, 0),
        (64, 127, 1),
    )
    assert (distribution.median, distribution.largest) == (2, 100)


def test_the_summary_counts_every_event(tmp_path: Path, log: Path) -> None:
    main(["prepare", "csv", str(log), "--out", str(tmp_path / "store")])
    summary = summarise(Store.open(tmp_path / "store"))
    assert sum(summary.over_time) == 300
    assert summary.lengths.mean == 25
    assert 0 < summary.top_shares["1%"] <= summary.top_shares["10%"] <= summary.top_shares["50%"] <= 1


def test_inspect_draws_with_ascii_where_the_output_is_not_unicode(tmp_path: Path) -> None:
    events = [(u, f"é{i}", 1_600_000_000 + t) for u, i, t in random_events(100, 4, 9, seed=1)]
    prepare("csv", write_csv(tmp_path / "log.csv", events), tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-m", "turbogr", "inspect", str(tmp_path / "store")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    shown = done.stdout.decode("ascii")
    assert "####" in shown
    assert "->" in shown
    assert "\\xe9" in shown
