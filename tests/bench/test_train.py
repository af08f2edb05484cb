"""bench train without its measuring: figures, the paper's column, and merging of records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turbogr.bench import run_benchmark, train
from turbogr.bench._paper_models import PAPER_CASES
from turbogr.bench._training import Case
from turbogr.errors import UserError
from turbogr.peak import Peak


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(case: Case) -> dict[str, object]:
        speed = 10.0 if case.backend == "reference" else 60.0 if case.precision == "bf16" else 50.0
        return {
            "tokens_per_second": speed,
            "strict_flops_per_second": 2e10,
            "nominal_flops_per_second": 5e10,
            "peak_memory_bytes": 2**20,
            "activation_bytes": 520 if case.precision == "bf16" else 1000,
            "profile": {"hstu_attention": 3.0, "between operators": 1.0},
        }

    monkeypatch.setattr(train, "measure_in_child", measured)
    monkeypatch.setattr(train, "measure_peak", lambda *args: Peak(fma=1e11, gemm=5e10))


def test_figures_and_the_papers_column() -> None:
    record, result = run_benchmark("train", ["cases=ml1m,fuxi_long"])
    assert record.figures["ml1m_vs_reference"] == 5.0
    assert record.figures["fuxi_long_bf16_speedup"] == 1.2
    assert record.figures["ml1m_bf16_activation_saving"] == pytest.approx(0.48)
    assert record.figures["fma_peak_gflops"] == 100 and record.figures["gemm_library_gflops"] == 50
    assert record.figures["fuxi_long_mfu_strict"] == pytest.approx(0.2)
    assert record.figures["fuxi_long_mfu_nominal"] == pytest.approx(0.5)
    rows = {row[0]: row for row in result.tables[0].rows}
    assert rows["fuxi_long"][4] == 0.5471 and rows["ml1m"][4] is None
    assert rows["ml1m, our reference operators"][1] == 10.0
    assert {"mfu", "ml1m", "profile-ml1m", "profile-fuxi_long"} == result.plots.keys()
    assert "75" in result.plots["profile-ml1m"]
    assert any("rectools_python" in note for note in result.notes)


def test_rectools_is_compared_with_and_without_freed_memory_kept(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "case = json.load(sys.stdin)\n"
        'print(json.dumps({"tokens_per_second": 4.0 if case["keep_freed_memory"] else 2.0}))\n'
    )
    python.chmod(0o755)
    record, result = run_benchmark("train", ["cases=ml1m", "reference=false", f"rectools_python={python}"])
    assert record.figures["ml1m_vs_rectools"] == 25 and record.figures["ml1m_vs_rectools_kept"] == 12.5
    rows = {row[0]: row for row in result.tables[0].rows}
    assert rows["ml1m, RecTools HSTUModel, freed memory kept"][1] == 4.0


def test_the_paper_gives_every_preset_a_figure() -> None:
    assert train.PAPER_MFU["hstu_tiny"] == 0.0043 and train.PAPER_MFU["hstu_long"] == 0.3408
    assert train.PAPER_MFU["fuxi_tiny"] == 0.0088
    assert set(train.PAPER_MFU) == set(PAPER_CASES)


def test_cases_measured_one_by_one_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    for case in ("ml1m", "hstu_large", "hstu_long"):
        record, result = run_benchmark("train", [f"cases={case}", f"merge={path}"])
        record.write(path)
    assert {"ml1m_vs_reference", "hstu_large_mfu_strict", "hstu_long_mfu_strict"} <= record.figures.keys()
    names = [row[0] for row in result.tables[0].rows]
    assert names == ["ml1m", "ml1m, our reference operators", "hstu_large", "hstu_long"]
    before = dict(record.figures)
    again, _ = run_benchmark("train", ["cases=ml1m", "reference=false", f"merge={path}"])
    assert before.keys() - again.figures.keys() == {
        "ml1m_vs_reference",
        "ml1m_reference_tokens_per_second",
        "ml1m_reference_peak_memory_bytes",
    }


@pytest.mark.parametrize(
    ("changes", "what"), [({"name": "gemm"}, "benchmark"), ({"machine": {}}, "machine"), ({"versions": {}}, "versions")]
)
def test_records_of_another_machine_are_not_merged(tmp_path: Path, changes: dict[str, object], what: str) -> None:
    path = tmp_path / "train.json"
    record, _ = run_benchmark("train", ["cases=hstu_tiny"])
    record.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=f"another {what}"):
        run_benchmark("train", ["cases=ml1m", f"merge={path}"])


def test_a_record_with_the_former_mfu_is_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    record, _ = run_benchmark("train", ["cases=hstu_tiny"])
    del record.figures["fma_peak_gflops"], record.figures["gemm_library_gflops"]
    record.write(path)
    with pytest.raises(UserError, match="MFU is a share of the matrix product's rate"):
        run_benchmark("train", ["cases=ml1m", f"merge={path}"])


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(UserError, match="hstu_large"):
        run_benchmark("train", ["cases=hstu_lage"])
