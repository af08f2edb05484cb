"""The public ranking model and attention masks are reproduced, and files of theirs are read and judged correctly."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.judging import instruction_set, needs_kernels
from turbogr.cli import main
from turbogr.config import ModelConfig
from turbogr.layers.stu import STUBlock, STUConfig
from turbogr.layers.tokens import Tokens
from turbogr.models.golden_files import read_golden
from turbogr.models.golden_ranking import RankingGolden
from turbogr.ops import native, registry

FOLDER = os.environ.get("TURBOGR_TEST_GOLDEN")
needs_golden = pytest.mark.skipif(FOLDER is None, reason="TURBOGR_TEST_GOLDEN does not name the folder of golden files")
every_backend = pytest.mark.parametrize(
    ("backend", "isa"),
    [("reference", None), *(pytest.param("cpu", name, marks=needs_kernels) for name in native.INSTRUCTION_SETS)],
)
RANKING = ("dlrm_hstu", "dlrm_hstu_rowclamp", "dlrm_hstu_groupnorm")


def file(name: str) -> Path:
    return Path(FOLDER or "") / f"{name}.npz"


@needs_golden
@every_backend
@pytest.mark.parametrize("name", RANKING)
def test_the_public_ranking_model_is_reproduced(name: str, backend: str, isa: str | None) -> None:
    golden = read_golden(file(name))
    assert isinstance(golden, RankingGolden)
    with registry.backend(backend), nullcontext() if isa is None else instruction_set(isa):
        differences = golden.compare()
    errors = {row.name: row.error for row in differences}
    compared = {"user_embeddings", "item_embeddings", "predictions", "labels", "losses", "loss"}
    assert errors.keys() == compared | {key for key in golden.tensors if key.startswith("grad/")}
    assert all(error < (1e-4 if key.startswith("grad/") else 1e-5) for key, error in errors.items()), errors


@needs_golden
def test_the_fault_of_the_time_clamp_is_seen() -> None:
    golden = read_golden(file("dlrm_hstu"))
    assert isinstance(golden, RankingGolden)
    other = read_golden(file("dlrm_hstu_rowclamp"))
    assert isinstance(other, RankingGolden)
    mixed = RankingGolden(other.sizes, golden.features, golden.tensors)
    assert max(row.error for row in mixed.compare() if row.name == "user_embeddings") > 1e-4


@needs_golden
@pytest.mark.parametrize("name", ["dlrm_hstu_groupnorm", "hstu_masks"])
def test_the_command_compares_and_judges(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", str(file(name))]) == 0
    assert "the same; the largest error is" in capsys.readouterr().out
    with np.load(file(name)) as content:
        arrays = {key: content[key] for key in content.files}
    changed = "user_embeddings" if "user_embeddings" in arrays else "window_targets/output"
    arrays[changed] = arrays[changed] + np.float32(3e-5)
    np.savez(tmp_path / "changed.npz", **arrays)
    assert main(["conformance", str(tmp_path / "changed.npz")]) == 1
    printed = capsys.readouterr().out
    assert "NOT the same; the largest error is 3.0e-05, above 1e-05" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.endswith("above tolerance")] == [changed]
    missing = next(key for key in arrays if key.startswith(("grad/_item", "window_targets/grad/q")))
    np.savez(tmp_path / "missing.npz", **{key: value for key, value in arrays.items() if key != missing})
    assert main(["conformance", str(tmp_path / "missing.npz")]) == 2
    assert missing in capsys.readouterr().err


@needs_golden
def test_all_cases_of_masks_are_compared() -> None:
    golden = read_golden(file("hstu_masks"))
    with registry.backend("reference"):
        differences = golden.compare()
    assert len(differences) == 15 * 4
    assert all(row.error < (row.tolerance or 1e-4) for row in differences)


@every_backend
@pytest.mark.parametrize("group_norm", [False, True])
@pytest.mark.parametrize("time_bias", [False, True])
def test_the_stu_block_is_its_definition(backend: str, isa: str | None, group_norm: bool, time_bias: bool) -> None:
    """Also without dropout, where the concatenation is never made."""
    config = ModelConfig(name="stu", dim=6, num_heads=2, qk_dim=3, v_dim=5, max_len=9, num_time_buckets=8)
    block = STUBlock(config, 1, STUConfig(group_norm, time_bias))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    times = torch.tensor([3, 5, 90, 4000, 5, 90_000, 7])
    x = torch.randn(7, 6, generator=generator, requires_grad=True)
    tokens = Tokens(torch.tensor([0, 4, 7]), times, times + 60, times, None)
    with registry.backend(backend), nullcontext() if isa is None else instruction_set(isa):
        ours = torch.autograd.grad(block(x, tokens).square().sum(), [x, *block.parameters()])
    block = block.double()
    expected = torch.autograd.grad(_definition(block, x.double(), tokens).square().sum(), [x, *block.parameters()])
    for mine, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, exact.to(mine.dtype), rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def _definition(block: STUBlock, x_td: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    functional, rows = torch.nn.functional, []
    for start, stop in ((0, 4), (4, 7)):
        x = x_td[start:stop]
        normal = functional.layer_norm(x, (6,), block.input_norm_weight, block.input_norm_bias, 1e-6)
        u, v, q, k = (normal @ block.uvqk + block.uvqk_bias).split([10, 10, 6, 6], dim=1)
        u = functional.silu(u)
        q, k, v = (part.view(len(x), 2, -1).transpose(0, 1) for part in (q, k, v))
        scores = q @ k.transpose(1, 2) / 3**0.5
        if block.options.time_bias:
            seconds = (tokens.next_times[start:stop, None] - tokens.times[None, start:stop]).abs().clamp(min=1)
            scores = scores + block.time_weight[(seconds.double().log() / 0.301).floor().long().clamp(max=8)]
        attended = ((functional.silu(scores) / 9).tril() @ v).transpose(0, 1)
        if block.options.group_norm:
            weight, bias = block.output_norm_weight[:, None], block.output_norm_bias[:, None]
            gated = (functional.layer_norm(attended, (5,), eps=1e-6) * weight + bias).flatten(1)
        else:
            weight, bias = block.output_norm_weight, block.output_norm_bias
            gated = functional.layer_norm(attended.flatten(1), (10,), weight, bias, 1e-6)
        rows.append(x + torch.cat([u, attended.flatten(1), u * gated], dim=1) @ block.out_weight)
    return torch.cat(rows)
