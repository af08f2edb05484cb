"""bench embedding at a size that takes a second: both sides compute the same, and FBGEMM may be missing."""

from __future__ import annotations

import sys

import pytest
import torch

from turbogr.bench import _embedding, _several_tables, embedding, run_benchmark
from turbogr.errors import UserError

SMALL = {"num_ids": 640, "num_padding": 300, "max_len": 64, "num_rows": 50, "width": 8, "dropout": 0.0}
ASSIGNMENTS = [*(f"{key}={value}" for key, value in SMALL.items()), "tables=[]"]


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


def test_an_environment_without_fbgemm_gives_a_note() -> None:
    record, result = run_benchmark("embedding", [*ASSIGNMENTS, "repeats=1", f"fbgemm_python={sys.executable}"])
    assert {"forward_speedup", "backward_speedup"} <= record.figures.keys()
    assert "forward_vs_fbgemm" not in record.figures
    assert any("fbgemm_gpu" in note for note in result.notes)


def test_impossible_settings() -> None:
    with pytest.raises(UserError, match="multiple of max_len"):
        run_benchmark("embedding", ["num_ids=100", "num_padding=10", "max_len=64"])
    with pytest.raises(UserError, match="tables must be numbers from 1 to 10"):
        run_benchmark("embedding", [*ASSIGNMENTS, "tables=[1, 11]"])


@pytest.mark.parametrize("num_tables", [1, 3, 10])
def test_features_share_out_the_ids(num_tables: int) -> None:
    features = _several_tables.make_features(SMALL, num_tables)
    padded = torch.cat([feature.padded for feature in features])
    assert len(features) == num_tables and padded.shape == (10, 64)
    assert int((padded == 0).sum()) == 300
    assert (padded != 0).sum(1).unique().numel() > 3
    for feature in features:
        assert torch.equal(feature.padded[feature.padded != 0], feature.ids)
        assert int(feature.ids.min()) >= 1 and int(feature.ids.max()) <= 50 // num_tables


def test_a_full_batch_has_full_sequences() -> None:
    lengths = _several_tables.draw_lengths({**SMALL, "num_padding": 0}, torch.Generator().manual_seed(0))
    assert lengths.tolist() == [64] * 10


@pytest.mark.parametrize("num_tables", [1, 3])
def test_the_fused_look_up_equals_one_embedding_per_table(num_tables: int) -> None:
    """Vectors bit for bit; gradients of the distinct rows to rounding, and no other row has one."""
    features = _several_tables.make_features(SMALL, num_tables)
    sides = _several_tables.make_sides(SMALL, features)
    sets, vectors = sides["ours"].forward()
    (gradients,) = sides["ours"].backward((sets, vectors))
    whole = torch.zeros(num_tables * (50 // num_tables + 1), 8).index_copy_(0, gradients.slots, gradients.grad)
    for name in ("dense", "sparse"):
        padded = sides[name].forward()
        for feature, ours, theirs in zip(features, vectors, padded, strict=True):
            assert torch.equal(ours, theirs[feature.real])
        expected = torch.cat([grad.to_dense() for grad in sides[name].backward(padded)])
        torch.testing.assert_close(whole, expected)
        assert float(expected.abs().sum()) > 0


def test_figures_of_several_tables() -> None:
    small = ["num_ids=2560", "num_padding=1200", "max_len=64", "num_rows=640", "width=8", "repeats=1"]
    record, result = run_benchmark("embedding", small)
    for part in ("forward", "backward"):
        for number in (1, 8, 32):
            assert record.figures[f"lookup_{part}_speedup_tables_{number}"] > 0
    assert [row[0] for row in result.tables[1].rows] == [1, 8, 32]
    assert any("coalesce" in note for note in result.notes)


def test_the_faster_gradient_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {
        "ours": {"forward": [1.0, 2.0, 1.0], "backward": [1.0, 1.0, 2.0]},
        "dense": {"forward": [3.0, 8.0, 5.0], "backward": [9.0, 9.0, 9.0]},
        "sparse": {"forward": [9.0, 9.0, 9.0], "backward": [4.0, 2.0, 6.0]},
    }
    monkeypatch.setattr(embedding, "_run_script", lambda *_: seconds)
    figures, table = embedding._compare_several_tables({"tables": [8]})
    assert figures == {"lookup_forward_speedup_tables_8": 4.0, "lookup_backward_speedup_tables_8": 3.0}
    assert list(table.rows[0]) == [8, 5000.0, 1000.0, 4.0, 4000.0, 1000.0, 3.0, "sparse"]


def test_the_bare_look_up_is_that_of_training() -> None:
    settings = {**embedding.SETTINGS, "num_ids": 4096, "num_padding": 2000, "num_rows": 500, "max_len": 512}
    sides = _several_tables.make_sides(settings, _several_tables.make_features(settings, 1))
    bare, ours = sides["bare"], sides["ours"]
    found = ours.forward()
    torch.testing.assert_close(bare.forward()[0], found[1][0])
    rows, sums = bare.backward(bare.forward())
    trained = ours.backward(found)[0]
    torch.testing.assert_close(sums[rows.argsort()], trained.grad[trained.slots.argsort()])
    assert "bare" not in _several_tables.make_sides(settings, _several_tables.make_features(settings, 2))
