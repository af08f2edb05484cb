"""When Triton's backend is chosen, and what the message says when it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from turbogr.cli import main
from turbogr.errors import UserError
from turbogr.ops import registry, triton_runtime

FOLDER = os.environ.get("TURBOGR_TEST_GOLDEN")
CPU, CUDA, FLOAT = torch.device("cpu"), torch.device("cuda"), torch.float32


def test_auto_never_interprets() -> None:
    assert registry.choose("hstu_attention", CPU, torch.bfloat16).__module__ != "turbogr.ops.jagged_attention.triton"
    with registry.backend("triton"):
        assert registry.choose("hstu_attention", CPU, FLOAT).__module__ == "turbogr.ops.jagged_attention.triton"


def test_auto_takes_it_on_a_device() -> None:
    assert (
        registry.choose("softmax_attention", CUDA, torch.bfloat16).__module__ == "turbogr.ops.jagged_attention.triton"
    )


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with registry.backend("triton"), pytest.raises(UserError, match="set TRITON_INTERPRET=1"):
        registry.choose("hstu_attention", CPU, FLOAT)


def test_other_types_are_refused() -> None:
    with registry.backend("triton"), pytest.raises(UserError, match="computes in float32, bfloat16 only"):
        registry.choose("hstu_attention", CPU, torch.float64)


@pytest.mark.parametrize(("allowed", "precision"), [("highest", "fp32"), ("high", "tf32")])
def test_pytorch_s_setting_decides_between_fp32_and_tf32(
    allowed: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    assert triton_runtime.precision_of(torch.zeros(1)) == precision
    assert triton_runtime.precision_of(torch.zeros(1, dtype=torch.bfloat16)) == "bf16"


def test_a_golden_file_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "hstu.npz")
    sizes = ["--dim=8", "--num-heads=1", "--num-blocks=1", "--max-len=4"]
    assert main(["conformance", file, "--write", "--model=hstu", *sizes]) == 0
    assert main(["conformance", file, "--backend=triton"]) == 0
    assert "the same" in capsys.readouterr().out
