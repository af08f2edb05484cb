from __future__ import annotations

import json

import pytest
import torch

from turbogr import cli, doctor, gemm_choice, machine, ops, peak
from turbogr.ops.projections import PRODUCTS, SIZES


def _only_in_full_precision(dtype):
    if dtype != torch.float32:
        raise peak.PeakUnavailable("there is no such instruction")
    return 2e11


@pytest.fixture
def facts(monkeypatch):
    monkeypatch.setattr(machine, "gemm_peak", lambda dtype, timeout: 5e10)
    monkeypatch.setattr(peak, "fma_peak", _only_in_full_precision)
    rates = {f"{size} {product}": {"torch": 50.0, "turbogr": 90.0} for size in SIZES for product in PRODUCTS}
    refused = {key: {"onednn": "its error is 2.0e-03"} for key in rates}
    monkeypatch.setattr(gemm_choice, "measured", lambda: gemm_choice.Measurement(rates, refused))
    return doctor.examine()


def test_the_facts_are_plain_json(facts):
    assert json.loads(json.dumps(facts)) == facts
    assert facts["devices"][-1] == "cpu"
    assert facts["memory"]["available_bytes"] <= facts["memory"]["total_bytes"]
    assert facts["gemm_peak"] == {name: {"flops": 5e10} for name in ("float32", "bfloat16", "float16")}
    assert facts["fma_peak"] == {"float32": {"flops": 2e11}, "bfloat16": {"fault": "there is no such instruction"}}


def test_every_operator_is_served_and_shown(facts):
    names = [service.operator for service in ops.services(torch.device("cpu"))]
    assert names == [row["operator"] for row in facts["operators"]]
    shown = doctor.describe(facts)
    assert all(name in shown for name in names)
    assert "50.0 GFLOP/s" in shown
    assert "turbogr  (torch 50.0, turbogr 90.0, onednn refused: its error is 2.0e-03)" in shown


def test_the_summary_has_ten_lines(facts):
    facts["warnings"] = []
    lines = doctor.summarise(facts).splitlines()
    assert len(lines) == 10 and lines[-1] == "Nothing to fix."
    assert lines[0].startswith("versions") and facts["versions"]["torch"] in lines[0]
    assert "float32 at most 200.0, matrix product 50.0 GFLOP/s, bfloat16 50.0" in lines[-2]
    facts["warnings"] = ["only 1 GB is free", "2 threads"]
    assert doctor.summarise(facts).splitlines()[-2:] == ["worth fixing: only 1 GB is free", "worth fixing: 2 threads"]


def test_the_summary_names_the_few_operators_that_are_slow(facts):
    names = [row["operator"] for row in facts["operators"]]
    for row in facts["operators"]:
        row["backend"] = "reference" if row["operator"] == names[0] else "cpu"
    shown = doctor.summarise(facts)
    assert f"1 of {len(names)} on reference ({names[0]}), {len(names) - 1} of {len(names)} on cpu" in shown


def test_the_command_is_short_and_has_the_rest_behind_an_option(capsys):
    assert cli.main(["doctor", "--quick"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["doctor", "--quick", "--details"]) == 0
    assert "Operators" not in short and "Operators" in capsys.readouterr().out


def test_a_precision_that_crashes_is_reported_and_does_not_crash_us(monkeypatch):
    monkeypatch.setattr(machine, "_GEMM_SIZES", (64,))
    monkeypatch.setattr(machine, "_GEMM_SECONDS", 0.01)
    monkeypatch.setattr(machine, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setattr(gemm_choice, "measured", lambda: None)
    facts = doctor.examine()
    assert "flops" in facts["gemm_peak"]["float32"]
    assert "SIGILL" in facts["gemm_peak"]["bfloat16"]["fault"]
    assert any("SIGILL; do not compute in bfloat16" in problem for problem in facts["warnings"])
    assert "SIGILL" in doctor.describe(facts)


def test_a_healthy_machine_has_nothing_to_fix(facts):
    facts["machine"].update(threads=2, cores=2)
    facts["operators"] = [{"operator": "embed", "backend": "cpu", "why": "the fastest"}]
    facts["disk"]["free_bytes"] = 100e9
    facts["memory"]["available_bytes"] = 20e9
    assert doctor.find_problems(facts) == []
    facts["warnings"] = []
    assert doctor.describe(facts).endswith("Nothing to fix.")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": {"threads": 8, "cores": 2}}, ["8 threads on 2", "OMP_NUM_THREADS=2"]),
        ({"gemm_peak": {"bfloat16": {"flops": 9.9e9}}}, ["bfloat16", "emulated", "19.8%", "train in float32"]),
        ({"disk": {"free_bytes": 1e9, "path": "/data"}}, ["1.0 GB", "/data", "free some space"]),
        ({"memory": {"available_bytes": 1e9}}, ["1.0 GB of memory", "end other programs"]),
        (
            {"operators": [{"operator": "embed", "backend": "reference", "why": "cpu: no library"}], "compiler": None},
            ["no C++ compiler", "install one"],
        ),
        (
            {
                "operators": [{"operator": "embed", "backend": "reference", "why": "cpu: no library"}],
                "compiler": "/c++",
            },
            ["cpu: no library", "/c++", "pip install"],
        ),
    ],
)
def test_each_problem_comes_with_its_remedy(facts, change, words):
    facts["machine"].update(threads=2, cores=2)
    facts["operators"] = [{"operator": "embed", "backend": "cpu", "why": "the fastest"}]
    facts["disk"]["free_bytes"], facts["memory"]["available_bytes"] = 100e9, 20e9
    for key, value in change.items():
        if isinstance(value, dict):
            facts[key].update(value)
        else:
            facts[key] = value
    (problem,) = doctor.find_problems(facts)
    assert all(word in problem for word in words)


def test_a_precision_of_its_own_speed_is_not_called_emulated(facts):
    facts["gemm_peak"]["bfloat16"] = {"flops": 1e10}
    facts["gemm_peak"]["float16"] = {"fault": "it crashed"}
    assert not any("emulated" in problem for problem in doctor.find_problems(facts))
    facts["gemm_peak"] = {}
    assert not any("emulated" in problem for problem in doctor.find_problems(facts))


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.compiler() is None


def test_the_compiler_that_is_configured(monkeypatch, tmp_path):
    tool = tmp_path / "my-c++"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", f"{tool} -O1")
    assert doctor.compiler() == str(tool)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.compiler() is None


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path):
    assert doctor._disk(tmp_path / "a" / "b")["path"] == str(tmp_path.resolve())


def test_the_command_writes_the_same_facts(tmp_path, capsys):
    assert cli.main(["doctor", "--quick", "--json", str(tmp_path / "facts.json")]) == 0
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["versions"]["torch"] in capsys.readouterr().out
    assert facts["gemm_peak"] == {}


def test_the_command_refuses_a_missing_folder_before_measuring(tmp_path, capsys):
    assert cli.main(["doctor", "--json", str(tmp_path / "no" / "facts.json")]) == 2
    assert "no does not exist; create it" in capsys.readouterr().err
