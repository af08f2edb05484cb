"""`turbogr doctor --accelerator`, on a device that is simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.simulated_device import DEVICE, SimulatedDevice, simulate
from turbogr import accelerator_check, cli, device_measurement, ops
from turbogr.accelerator_check import Sizes, check_accelerator, summarise
from turbogr.accelerator_ranks import check_exchange, exchange_between_two
from turbogr.config import ModelConfig
from turbogr.models.golden import write_golden
from turbogr.operator_cases import all_cases
from turbogr.ops import registry

TINY = Sizes((4, 8, 4096), 2, 2, 4, 8, 2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr(device_measurement, "_GEMM_SIZES", (16,))
    monkeypatch.setattr(device_measurement, "_GEMM_SECONDS", 0.001)
    monkeypatch.setattr(registry, "_chosen", {})


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.npz"
    config = ModelConfig(name="hstu", dim=8, num_blocks=1, num_heads=2, max_len=6, dropout=0.0)
    write_golden(path, config, num_items=9, num_sequences=3)
    return path


def test_a_sound_device_has_nothing_wrong(golden: Path) -> None:
    said: list[str] = []
    with SimulatedDevice():
        found = check_accelerator(DEVICE, [golden], sizes=TINY, say=said.append)
    assert found["failed"] == []
    assert json.loads(json.dumps(found)) == found
    assert said == ["device", "operators", "golden", "same_step_twice", "gemm_flops", "block", "attention", "ranks"]
    assert found["operators"].keys() == ops.registry.operators().keys() and found["golden"][golden.name] < 1e-5
    assert found["operators"]["unique_rows"]["fp32"] == {"error": 0.0, "allowed": 0.0, "fine": True}
    assert 0 < found["operators"]["hstu_attention"]["bf16"]["error"] < 0.1
    assert found["same_step_twice"] == {"equal": True} and found["gemm_flops"].keys() == {"fp32", "tf32", "bf16"}
    short, _, long = found["attention"]["shapes"]
    assert short["fp32"]["flops"] > 0 and short["num_sequences"] == 1 and "plain PyTorch" in long["fault"]
    shown = summarise(found)
    assert (
        shown.endswith("Nothing is wrong.")
        and f"{len(all_cases())} compared with float64" in shown
        and "two devices" in shown
    )


def test_every_operator_has_a_case() -> None:
    assert sorted(case.operator for case in all_cases()) == sorted(registry.operators())


def test_what_is_wrong_is_found_and_named(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = registry.choose("norm_linear", DEVICE, torch.float32)

    def wrong(*args: Any) -> Any:
        found = right(*args)
        return [part * 1.001 for part in found] if isinstance(found, list) else found * 1.001

    monkeypatch.setattr(registry, "_operators", dict(registry._operators))
    registry.register_backend("norm_linear", registry.Backend("broken", devices=("meta",)), wrong)
    monkeypatch.setattr(accelerator_check, "same_step_twice", lambda device: {"equal": False})

    def out_of_memory(device: torch.device, sizes: Sizes) -> Any:
        raise RuntimeError("out of memory\nat some place")

    monkeypatch.setattr(accelerator_check, "block_memory", out_of_memory)
    with SimulatedDevice():
        found = check_accelerator(DEVICE, [golden], sizes=TINY)
    assert found["failed"][0] == "block: RuntimeError: out of memory"
    assert found["failed"][1].startswith("norm_linear in fp32: error 1.0e-03, allowed is ")
    assert found["failed"][2].startswith("golden file golden.npz: error ")
    assert found["failed"][3:] == ["the same step computed twice gives different weights"]
    assert "wrong: block: RuntimeError: out of memory" in summarise(found)


def test_the_time_is_bounded() -> None:
    found = check_accelerator(CPU, max_seconds=-1.0)
    assert len(found["failed"]) == 8 and all("the time was over" in failure for failure in found["failed"])
    assert "wrong: operators" in summarise(found)


def test_the_command_writes_one_file(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accelerator_check, "Sizes", lambda: Sizes((4,), 2, 2, 4, 8, 2))
    monkeypatch.setattr(accelerator_check, "compare_operators", lambda device: {})
    assert cli.main(["doctor", "--accelerator=cpu", "--golden", str(golden)]) == 0
    assert json.loads((tmp_path / accelerator_check.DEFAULT_FILE).read_text())["golden"][golden.name] < 1e-5
    assert cli.main(["doctor", "--golden", str(golden)]) == 2
    assert "add --accelerator" in capsys.readouterr().err
    monkeypatch.setattr("turbogr.commands.doctor.available_accelerator", lambda: None)
    assert cli.main(["doctor", "--accelerator"]) == 2
    assert "torch finds no accelerator on this machine" in capsys.readouterr().err


def exchange() -> dict[str, Any]:
    return check_exchange(CPU)


def test_two_ranks_find_what_must_come_out() -> None:
    for found in run_ranks(2, exchange):
        assert "fault" not in found and found["1_groups_seconds"] > 0 and found["2_groups_seconds"] > 0
    assert exchange_between_two(DEVICE) == {"what": "not tried: it takes two devices"}
