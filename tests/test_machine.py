from __future__ import annotations

import json
import os
import time

import pytest
import torch

from turbogr import machine


def test_facts_are_plain_json_and_plausible():
    facts = machine.machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cpu"]
    assert 1 <= facts["cores"] <= (os.cpu_count() or 1)
    assert facts["threads"] == torch.get_num_threads()
    assert 2**28 < facts["memory_bytes"] < 2**50


def test_memory_honours_a_container_limit(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "1073741824\n" if path.endswith("memory.max") else "")
    assert machine.memory_bytes() == 2**30


def test_versions_name_what_results_depend_on():
    found = machine.versions()
    assert found["torch"] == torch.__version__
    assert {"python", "numpy"} <= found.keys()


def test_peak_is_measured_and_threads_are_restored(monkeypatch):
    monkeypatch.setattr(machine, "_GEMM_SIZES", (64, 128))
    monkeypatch.setattr(machine, "_GEMM_SECONDS", 0.01)
    before = torch.get_num_threads()
    assert machine.gemm_peak(torch.float32, threads=1) > 1e7
    assert torch.get_num_threads() == before


def test_growing_stops_where_a_precision_is_emulated(monkeypatch):
    sizes = []

    def slow(size, dtype):
        sizes.append(size)
        return 1e6

    monkeypatch.setattr(machine, "_gemm_rate", slow)
    assert machine.gemm_peak(torch.float32) == 1e6
    assert sizes == [256]


def test_a_low_precision_probe_that_crashes_does_not_crash_us(monkeypatch):
    monkeypatch.setattr(machine, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(machine.GemmUnavailable, match=r"bfloat16.*SIGILL"):
        machine.gemm_peak(torch.bfloat16)


def test_a_probe_that_hangs_is_abandoned(monkeypatch):
    monkeypatch.setattr(machine, "_CHILD", "import time; time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(machine.GemmUnavailable, match="did not finish"):
        machine.gemm_peak(torch.float16, timeout=0.5)
    assert time.monotonic() - start < 20


def test_a_probe_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(machine, "_CHILD", "raise RuntimeError('not implemented for Half')")
    with pytest.raises(machine.GemmUnavailable, match="not implemented for Half"):
        machine.gemm_peak(torch.float16)


def test_the_child_measures_with_the_packages_of_this_process(monkeypatch):
    monkeypatch.setattr(
        machine,
        "_CHILD",
        machine._CHILD.replace("print(", "import turbogr.machine as m; m._GEMM_SIZES = (64,)\nprint("),
    )
    assert machine.gemm_peak(torch.float64, threads=1) > 1e6


@pytest.fixture
def _fresh_faults():
    machine.matmul_fault.cache_clear()
    yield
    machine.matmul_fault.cache_clear()


@pytest.mark.usefixtures("_fresh_faults")
def test_a_precision_that_works_has_no_fault(monkeypatch):
    assert machine.matmul_fault(torch.float32) is None
    assert machine.matmul_fault(torch.float64) is None
    monkeypatch.setattr(machine, "_PROBE", machine._PROBE.replace("sys.argv[2]", "'float32'"))
    assert machine.matmul_fault(torch.float16) is None


@pytest.mark.usefixtures("_fresh_faults")
def test_a_precision_that_crashes_is_known_before_it_is_used_and_tried_once(monkeypatch):
    monkeypatch.setattr(machine, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert "bfloat16 matrix product crashed with SIGILL" in machine.matmul_fault(torch.bfloat16)
    monkeypatch.setattr(machine, "_PROBE", "raise AssertionError('tried again')")
    assert "SIGILL" in machine.matmul_fault(torch.bfloat16)


def test_the_memory_of_an_accelerator_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (1 << 30, 64 << 30))
    assert machine.device_memory(torch.device("cuda:0")) == 64 << 30

    def silent(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", silent)
    assert machine.device_memory(torch.device("cuda:0")) == 0
