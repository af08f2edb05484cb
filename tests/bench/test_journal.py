"""A benchmark that is interrupted, or that fails in a case, keeps what it has measured and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from turbogr import bench
from turbogr.bench import _children, _journal
from turbogr.bench._children import MeasurementFailed, in_child
from turbogr.bench._journal import CaseFailed, Journal, measured
from turbogr.bench.record import Record, Result
from turbogr.cli import main


class Fake(types.ModuleType):
    """A benchmark of three cases that counts what it measures; `trouble`: what happens in a case."""

    SETTINGS: ClassVar[dict[str, Any]] = {"cases": ["a", "b", "c"], "scale": 1.0}

    def __init__(self) -> None:
        super().__init__("fake")
        self.done: list[str] = []
        self.trouble: dict[str, BaseException] = {}
        self.leaves_out = False

    def run(self, settings: dict[str, Any]) -> Result:
        figures, notes = {}, []
        for case in settings["cases"]:
            try:
                figures[case] = measured(case, lambda case=case: self.work(case, settings))["value"]
            except CaseFailed as error:
                if not self.leaves_out:
                    raise
                notes.append(str(error))
        return Result(figures, notes=notes)

    def work(self, case: str, settings: dict[str, Any]) -> dict[str, float]:
        if case in self.trouble:
            raise self.trouble[case]
        self.done.append(case)
        return {"value": settings["scale"] * len(self.done)}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = Fake()
    monkeypatch.setattr(bench, "load", lambda name: module)
    return module


def run(target: Path, *more: str) -> int:
    return main(["bench", "fake", "--json", str(target), *more])


def test_an_interrupted_benchmark_goes_on(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, partial = tmp_path / "x.json", tmp_path / "x.partial.json"
    fake.trouble = {"c": KeyboardInterrupt()}
    assert run(target) == 130
    printed = capsys.readouterr().err
    assert f"2 measured cases are kept in {partial}; the same command measures the others" in printed
    assert "interrupted" in printed and not target.exists()
    fake.trouble = {}
    assert run(target) == 0
    assert fake.done == ["a", "b", "c"], "nothing is measured twice"
    assert f"2 cases are taken from {partial}" in capsys.readouterr().err
    assert Record.read(target).figures == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert not partial.exists()


def test_a_failure_names_the_case_and_keeps_the_others(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.trouble = {"b": MeasurementFailed("rank 1 of 2 ended with -6: terminate called")}
    assert run(tmp_path / "x.json") == 2
    printed = capsys.readouterr().err
    assert "error: b could not be measured: rank 1 of 2 ended with -6: terminate called" in printed
    assert "1 measured cases are kept" in printed and "Traceback" not in printed


def test_a_case_that_is_left_out_can_be_measured_later(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.leaves_out, fake.trouble = True, {"b": MeasurementFailed("no memory")}
    target, partial = tmp_path / "x.json", tmp_path / "x.partial.json"
    assert run(target) == 0
    printed = capsys.readouterr()
    assert "note: b could not be measured: no memory" in printed.out
    assert "not complete; the same command measures what is missing: b" in printed.err
    assert Record.read(target).figures.keys() == {"a", "c"} and partial.exists()
    fake.trouble = {}
    assert run(target) == 0
    assert fake.done == ["a", "c", "b"] and not partial.exists()
    assert Record.read(target).figures.keys() == {"a", "b", "c"}


def test_what_was_measured_otherwise_is_not_mixed(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.trouble = {"c": KeyboardInterrupt()}
    run(tmp_path / "x.json")
    capsys.readouterr()
    assert run(tmp_path / "x.json", "--set", "scale=2") == 2
    assert "2 cases of an interrupted benchmark with another settings.scale (1.0, not 2.0)" in capsys.readouterr().err
    content = json.loads((tmp_path / "x.partial.json").read_text())
    for key in ("machine.cpu", "code", "versions.torch", "benchmark"):
        changed = {**content, "identity": {**content["identity"], key: "other"}}
        (tmp_path / "x.partial.json").write_text(json.dumps(changed))
        assert run(tmp_path / "x.json") == 2
        assert f"with another {key} (other, not " in capsys.readouterr().err
    (tmp_path / "x.partial.json").write_text("{")
    assert run(tmp_path / "x.json") == 2
    assert "x.partial.json is not a journal" in capsys.readouterr().err


def test_without_a_target_nothing_is_kept(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.trouble = {"b": KeyboardInterrupt()}
    assert main(["bench", "fake"]) == 130
    assert "1 measured cases are lost; with --json FILE they are kept" in capsys.readouterr().err


def test_values_are_the_same_fresh_and_kept(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "b": (0.1, 1e-300)}
    fresh = Journal(tmp_path / "j").measured("x", lambda: value)
    assert fresh == Journal(tmp_path / "j").measured("x", lambda: pytest.fail("measured again"))
    assert fresh == {"a": [1, 2.5, None], "b": [0.1, 1e-300]}


def test_two_cases_of_one_name_are_a_bug() -> None:
    journal = Journal()
    with _journal.using(journal):
        assert measured("x", lambda: 1) == 1
        with pytest.raises(AssertionError, match="two cases are called 'x'"):
            measured("x", lambda: 2)
    assert measured("x", lambda: 2) == 2, "without a journal all is measured"


def fail(text: str) -> None:
    raise ValueError(text)


def is_killed(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_measures(method: Any) -> None:
    assert in_child(str, 5, method) == "5"
    with pytest.raises(MeasurementFailed, match="ValueError: it is wrong"):
        in_child(fail, "it is wrong", method)
    with pytest.raises(MeasurementFailed, match="was killed, as the system does when memory runs out"):
        in_child(is_killed, None, method)


def test_the_reason_of_a_failed_process() -> None:
    error = _children.failure("Traceback (most recent call last):\n  x\nOSError: no disk\n", 1)
    assert str(error) == "the measuring process ended with 1: OSError: no disk"
    assert "Traceback" in str(error.__cause__)


INTERRUPTED = """
import sys, time
from turbogr import bench
from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench.record import Result
from turbogr.cli import main

class Fake:
    SETTINGS = {}
    def run(settings):
        measured("first", lambda: 1)
        print("measuring", flush=True)
        measured("second", lambda: in_child(time.sleep, 1000, "spawn"))

bench.load = lambda name: Fake
if __name__ == "__main__":
    sys.exit(main(["bench", "fake", "--json", sys.argv[1]]))
"""


def test_ctrl_c_says_what_is_kept_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "fake.py"), str(tmp_path / "x.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "measuring\n"
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 measured cases are kept" in printed and "Traceback" not in printed


def test_every_long_benchmark_has_a_journal() -> None:
    """All but those of one case, of a minute, or with folders that they keep and take up again."""
    folder = Path(bench.__file__).parent
    without = ("checkpoint", "collisions", "first_result", "gemm", "serving")
    for name in bench.names():
        sources = "".join(path.read_text() for path in [folder / f"{name}.py", *folder.glob(f"_{name}_*.py")])
        assert ("_journal import" in sources) is (name not in without), name
