"""bench tiles: one real measurement with the kernels in use, and the figures computed from the times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.judging import needs_kernels
from turbogr.bench import run_benchmark, tiles
from turbogr.errors import UserError

SMALL = ["head_dims=8", "lengths=16,40", "tokens=64", "heads=1", "repeats=1", "rounds=2"]


@needs_kernels
def test_the_built_in_choice_alone_is_the_best() -> None:
    record, result = run_benchmark("tiles", [*SMALL, "blocks=[]", "task_floats=[]"])
    assert record.figures == {"builtin_vs_best_d8_n16": 1.0, "builtin_vs_best_d8_n40": 1.0, "worst": 1.0}
    assert [row[:2] for row in result.tables[0].rows] == [[8, 16], [8, 40]]


@needs_kernels
def test_a_faster_candidate_is_named_and_one_that_cannot_be_built_gives_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(candidate: tiles.Candidate, root: Path, folder: Path) -> Path:
        if candidate.defines.endswith("=7"):
            raise RuntimeError("blocks must hold whole micro-tiles")
        return Path("library.so")

    monkeypatch.setattr(tiles, "_build", build)
    monkeypatch.setattr(tiles, "_measure", lambda shapes, _, variables: [1.0, 3.0] if variables else [2.0, 1.5])
    record, result = run_benchmark("tiles", [*SMALL, "blocks=7,48", "task_floats=[]"])
    assert record.figures == {"builtin_vs_best_d8_n16": 2.0, "builtin_vs_best_d8_n40": 1.0, "worst": 2.0}
    assert [row[-2] for row in result.tables[0].rows] == ["block 48", "built in"]
    assert any("block 7 was left out: blocks must" in note for note in result.notes)


def test_an_installed_package_has_nothing_to_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiles.turbogr, "__file__", str(tmp_path / "turbogr" / "__init__.py"))
    with pytest.raises(UserError, match="source tree"):
        run_benchmark("tiles", SMALL)
