from __future__ import annotations

import argparse
import json
import math
import os

import pytest

from turbogr import bench
from turbogr.bench.record import Record, Result, Table, parse_settings, summarise
from turbogr.commands import bench as command
from turbogr.errors import UserError

DEFAULTS = {"rows": 1000, "rate": 0.5, "sizes": [1, 2], "name": "all", "fast": False, "limit": None}


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def test_a_record_is_written_and_read(tmp_path):
    record = summarise("x", Result({"speed": 2}), {"rows": 5}, command="turbogr bench x")
    record.write(tmp_path / "x.json")
    assert Record.read(tmp_path / "x.json") == record
    content = json.loads((tmp_path / "x.json").read_text())
    assert list(content) == ["name", "figures", "machine", "versions", "command", "settings"]
    assert content["figures"] == {"speed": 2.0}
    assert content["machine"]["cores"] >= 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "more": 1}'])
def test_a_file_that_is_not_a_record_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"x\.json: not a benchmark record"):
        Record.read(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "fast", None])
def test_figures_are_finite_numbers(value):
    with pytest.raises(ValueError, match="'speed' must be a finite number"):
        Result({"speed": value})


@pytest.mark.parametrize(
    ("assignment", "key", "expected"),
    [
        ("rows=7", "rows", 7),
        ("rows=1e6", "rows", 1_000_000),
        ("rate=2", "rate", 2.0),
        ("rate=1e-3", "rate", 0.001),
        ("sizes=3,4", "sizes", [3, 4]),
        ("sizes=[5]", "sizes", [5]),
        ("sizes=6", "sizes", [6]),
        ("name=12", "name", "12"),
        ("name=a=b", "name", "a=b"),
        ("fast=true", "fast", True),
        ("limit=9", "limit", 9),
    ],
)
def test_settings_take_the_type_of_their_default(assignment, key, expected):
    value = parse_settings("x", DEFAULTS, [assignment])[key]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rows", "write key=value"),
        ("row=1", "Did you mean 'rows'"),
        ("rows=many", "rows takes a whole number, got 'many'"),
        ("rows=1.5", "rows takes a whole number"),
        ("rows=true", "rows takes a whole number"),
        ("rate=true", "rate takes a number"),
        ("fast=1", "fast takes true or false"),
        ("sizes=1,x", "sizes takes a whole number"),
        ("rows=[", "cannot read the value"),
        ("sizes=1,]", "cannot read the value"),
        ("sizes=[1,", "cannot read the value"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_remedy(assignment, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        parse_settings("x", DEFAULTS, [assignment])


def test_an_unknown_benchmark_names_the_nearest():
    with pytest.raises(UserError, match=r"no benchmark 'gemn'.*Did you mean 'gemm'"):
        bench.load("gemn")
    with pytest.raises(UserError, match="no benchmark 'record'"):
        bench.load("record")


def test_every_benchmark_says_what_it_measures_and_has_settings():
    assert "gemm" in bench.names()
    assert "record" not in bench.names()
    for name in bench.names():
        assert len(bench.describe(name)) > 10, name
        lines = bench.docstring(name).splitlines()
        for start in ("Claim: ", "Compared with: ", "Keys"):
            assert sum(line.startswith(start) for line in lines) == 1, f"bench {name}: no line '{start}...'"


def test_tables_align():
    text = Table("sizes", ["what", "count"], [["a", 12], ["longer", 3456], ["none", None]]).text()
    assert text.splitlines() == [
        "sizes",
        "what    count",
        "------  -----",
        "a          12",
        "longer  3,456",
        "none        -",
    ]


def test_the_command_lists_the_benchmarks(capsys):
    args = arguments()
    assert args.run(args) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == bench.names()
    assert any(line.startswith("gemm ") and line.endswith(bench.describe("gemm")) for line in printed)


def test_the_command_measures_prints_and_saves(tmp_path, capsys):
    target = tmp_path / "new" / "gemm.json"
    args = arguments("gemm", "--json", str(target), "--set", "precisions=float32", "--set", "threads=1")
    assert args.run(args) == 0
    record = Record.read(target)
    assert record.name == "gemm"
    assert record.settings["threads"] == 1
    assert record.figures["gflops_float32"] > 0.1
    assert "<svg" in target.with_suffix(".svg").read_text()
    printed = capsys.readouterr().out
    assert "float32" in printed
    assert str(target.with_suffix(".svg")) in printed


def test_a_precision_that_crashes_gives_a_note_and_no_figure(monkeypatch):
    from turbogr import machine

    monkeypatch.setattr(machine, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setattr(machine, "_GEMM_SIZES", (64,))
    record, result = bench.run_benchmark("gemm", ["precisions=float32,bfloat16"])
    # A machine with fused multiply-adds in bfloat16 has their peak all the same.
    assert set(record.figures) - {"fma_gflops_bfloat16"} == {"gflops_float32", "fma_gflops_float32"}
    assert "SIGILL" in result.notes[0]
    assert "bfloat16" in result.plots["gemm"]


def test_a_target_that_cannot_be_written_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "run_benchmark", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path, tmp_path / "file" / "x.json", tmp_path / "x.svg", tmp_path / "pipe"):
        args = arguments("gemm", "--json", str(target))
        with pytest.raises(UserError, match="--json"):
            args.run(args)


def test_several_plots_get_their_names(tmp_path):
    written = command._write_plots(Result({}, plots={"a": "<svg/>", "b": "<svg/>"}), tmp_path / "x.json")
    assert [path.name for path in written] == ["x-a.svg", "x-b.svg"]
