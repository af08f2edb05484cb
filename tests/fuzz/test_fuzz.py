"""A few thousand random inputs and some mutated folders; the fuzzers find what is planted. `make fuzz` has more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fuzz import operators
from tests.fuzz.operator_inputs import OPERATORS, Call, draw_call
from tests.ops.judging import needs_kernels
from turbogr.ops import bf16_unit, native, registry
from turbogr.ops.jagged_attention import cpu_relative

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings() -> Iterator[None]:
    """Restore what `settle` changes."""
    isa, threads, small = native.isa(), torch.get_num_threads(), cpu_relative.SMALL_BLOCKS_UP_TO
    unit = bf16_unit.in_use()
    yield
    bf16_unit.use("none")
    native.set_isa(isa)
    bf16_unit.use(unit)
    torch.set_num_threads(threads)
    cpu_relative.SMALL_BLOCKS_UP_TO = small


def test_every_operator_has_inputs() -> None:
    assert OPERATORS.keys() == registry.operators().keys()


@needs_kernels
@pytest.mark.parametrize("block", range(6))
def test_random_inputs_of_every_operator(block: int, settings: None) -> None:
    name = operators.settle(block)
    outcomes = [operators.compute(1, block * 1000 + number) for number in range(400)]
    assert [outcome for outcome in outcomes if outcome.problem] == [], name
    assert {outcome.kind for outcome in outcomes} == OPERATORS.keys()
    assert 0.02 < sum(outcome.result == "refused" for outcome in outcomes) / len(outcomes) < 0.3
    assert any(outcome.compared for outcome in outcomes)


def test_an_input_is_a_function_of_seed_and_number() -> None:
    ours, again, other = draw_call(3, 16), draw_call(3, 16), draw_call(4, 16)
    assert str(ours.args) == str(again.args) != str(other.args)


@needs_kernels
def test_a_wrong_result_and_a_wrong_refusal_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = range(0, len(OPERATORS) * 21 * 8, 21)
    sound = [number for number in numbers if operators.compute(1, number).compared]
    run = Call.run

    def wrong(self: Call, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        calls.append(dtype)
        return [result + (len(calls) % 3 == 1) for result in run(self, dtype)]  # then come the two of the definition

    calls: list[torch.dtype | None] = []

    monkeypatch.setattr(Call, "run", wrong)
    problems = [operators.compute(1, number).problem for number in sound]
    assert len(sound) > 50 and sum(problem is not None for problem in problems) > 0.8 * len(sound), (
        "but for empty results"
    )

    def refusing(self: Call, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        raise ValueError("no")

    monkeypatch.setattr(Call, "run", refusing)
    assert operators.compute(1, sound[0]).problem == "a sound input is refused: no"
    damaged = next(number for number in range(500) if draw_call(1, number).damage)
    assert operators.compute(1, damaged).problem is None
    monkeypatch.setattr(Call, "run", lambda self, dtype=None: [])
    assert "and it is computed" in str(operators.compute(1, damaged).problem)


FALLING = """
import os, sys
from tests.fuzz.watching import Cases, Outcome, run_cases

def compute(seed, number):
    if number == int(os.environ["FALLS_AT"]):
        os.abort()
    return Outcome("computed", "case")

cases = Cases(module="falling", identity={}, settle=lambda block: f"block {block % 2}", compute=compute, block=10)
sys.exit(run_cases(cases, 100))
"""


def test_the_input_at_which_a_process_ends_is_named_and_the_rest_goes_on_later(tmp_path: Path) -> None:
    (tmp_path / "falling.py").write_text(FALLING)
    record = tmp_path / "record.json"

    def run(falls_at: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "FALLS_AT": str(falls_at)}
        command = [sys.executable, "-m", "falling", "--json", str(record), "--processes", "2"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)

    first = run(57)
    assert first.returncode == 1 and "input 57:" in first.stdout and not record.exists(), first
    assert json.loads((tmp_path / "record.json.partial-1").read_text())["done"] == 20
    second = run(-1)
    assert second.returncode == 0, second
    found = json.loads(record.read_text())
    assert (found["inputs"], found["failures"]) == (100, [])
    assert found["by_kind"] == {"computed": {"case": 100}} and found["by_setting"] == {"block 0": 50, "block 1": 50}
    assert sorted(path.name for path in tmp_path.glob("record*")) == ["record.json"]


def test_mutated_folders_and_recipes() -> None:
    """Each is opened by a command; the process has a memory limit and a hook that sees what runs."""
    command = [sys.executable, "-m", "tests.fuzz.folders", "--inputs", "60", "--seed", "1", "--processes", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
