"""bench embedding at a size that takes a second: what it compares is the same mathematics, and FBGEMM may be absent."""

from __future__ import annotations

import sys

import pytest
import torch

from turbogr.bench import _embedding, embedding, run_benchmark
from turbogr.errors import UserError

SMALL = {"num_ids": 640, "num_padding": 300, "max_len": 64, "num_rows": 50, "width": 8, "dropout": 0.0}
ASSIGNMENTS = [f"{key}={value}" for key, value in SMALL.items()]


def test_ids_are_the_same_with_and_without_padding() -> None:
    ids, padded = _embedding.make_ids(SMALL)
    assert ids.numel() == 340 and padded.shape == (10, 64)
    assert int((padded == 0).sum()) == 300
    assert torch.equal(padded[padded != 0], ids)
    assert int(ids.min()) >= 1 and int(ids.max()) <= 50


@pytest.mark.parametrize(("theirs", "ours"), [("padded_lookup", "our_lookup"), ("padded_stage", "our_stage")])
def test_both_sides_compute_the_same(theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of the real tokens, and the table after an update by the same gradient."""
    ids, padded = _embedding.make_ids(SMALL)
    real = padded != 0
    grad = torch.randn(*padded.shape, 8)
    positions = torch.randn(64, 8)

    def randn(*shape: int) -> torch.Tensor:
        return {(10, 64, 8): grad, (340, 8): grad[real], (64, 8): positions}[shape]

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch.nn, "Embedding", _embedding_with(positions))
    start = torch.rand(51, 8)
    outputs, tables = [], []
    for way in (theirs, ours):
        table = start.clone()
        forward, backward = _embedding.WAYS[way](SMALL, table, ids, padded)
        out = forward()
        backward(out)
        outputs.append(out.detach().reshape(-1, 8) if out.dim() == 2 else out.detach()[real])
        tables.append(table.detach())
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(tables[0], tables[1])
    assert not torch.equal(tables[0], start)


def _embedding_with(positions: torch.Tensor) -> type[torch.nn.Embedding]:
    class WithPositions(torch.nn.Embedding):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(positions)

    return WithPositions


def test_figures_without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"padded_stage": 6.0, "our_stage": 2.0, "padded_lookup": 5.0, "our_lookup": 1.0}
    monkeypatch.setattr(embedding, "_time", lambda way, *_: embedding.Timing(seconds[way], 2 * seconds[way]))
    record, result = run_benchmark("embedding", ASSIGNMENTS)
    assert record.figures == {
        "forward_speedup": 3.0,
        "backward_speedup": 3.0,
        "lookup_forward_speedup": 5.0,
        "lookup_backward_speedup": 5.0,
    }
    assert any("fbgemm_python" in note for note in result.notes)


def test_an_environment_without_fbgemm_is_told() -> None:
    record, result = run_benchmark("embedding", [*ASSIGNMENTS, "repeats=1", f"fbgemm_python={sys.executable}"])
    assert {"forward_speedup", "backward_speedup"} <= record.figures.keys()
    assert "forward_vs_fbgemm" not in record.figures
    assert any("fbgemm_gpu" in note for note in result.notes)


def test_impossible_settings() -> None:
    with pytest.raises(UserError, match="multiple of max_len"):
        run_benchmark("embedding", ["num_ids=100", "num_padding=10", "max_len=64"])
