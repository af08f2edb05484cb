from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from turbogr.bench import serving
from turbogr.errors import UserError

pytest.importorskip("faiss", reason="the index needs the extra turbogr[index]")
pytest.importorskip("uvicorn", reason="serving needs the extra turbogr[serve]")
SIZES = {"hnsw_items": 500, "connections": [2], "seconds": 1, "dim": 8, "blocks": 1, "max_len": 10, "history": 4}
SMALL = {**serving.SETTINGS, **SIZES}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving") / "exports"


@pytest.mark.parametrize("client", ["wrk", "python"])
def test_a_small_load_has_no_errors(client: str, exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if client == "wrk" and shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    if client == "python":
        monkeypatch.setattr(serving.shutil, "which", lambda name: None)
    result = serving.run({**SMALL, "exact_items": 0, "exports": str(exports)})
    assert result.figures["hnsw_c2_errors"] == 0 and result.figures["hnsw_c2_requests_per_second"] > 0
    assert 0 < result.figures["hnsw_c2_p50_ms"] <= result.figures["hnsw_c2_p99_ms"]
    assert result.figures["hnsw_recall"] > 0.9
    assert "exact was left out" in result.notes and len(result.notes) == 1 + (client == "python")
    (kept,) = exports.iterdir()
    assert kept.name.startswith("hnsw-500-8-")


def test_what_wrk_says_is_shown(tmp_path: Path) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    (tmp_path / "bodies.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="ended with 1: unable to connect"):
        serving._load_with_wrk(1, tmp_path / "bodies.jsonl", 1, 1)
    with pytest.raises(UserError, match="seconds is 0; give at least 1"):
        serving.run({**SMALL, "seconds": 0})
