"""tools/compare_negatives.py: finished runs are kept, and the table says what they reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import compare_negatives
from turbogr.config import load_config


def write_summary(run: Path, value: float) -> None:
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"metrics": {"hr@10": value}}))


def test_the_table_has_means_over_the_seeds_that_are_there(tmp_path: Path) -> None:
    for seed, value in enumerate((0.1, 0.3)):
        write_summary(compare_negatives.run_folder(tmp_path, "64", seed), value)
    write_summary(compare_negatives.run_folder(tmp_path, "128 fp16", 0), 0.5)
    assert compare_negatives.table(tmp_path, list(compare_negatives.OBJECTIVES), 3).splitlines() == [
        "| negatives | runs | hr@10 |",
        "|---|---|---|",
        "| 128 fp16 | 1 | 0.5000 |",
        "| 64 | 2 | 0.2000 ± 0.1414 |",
    ]


def test_finished_runs_are_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(compare_negatives.run_folder(tmp_path, "64", 0), 0.1)
    arguments = ["nowhere.yaml", "--data", "nowhere", "--out", str(tmp_path), "--seeds", "1", "--only", "64"]
    assert compare_negatives.main(arguments) == 0
    assert "0.1000" in capsys.readouterr().out
    assert compare_negatives.main([*arguments, "128"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("name", compare_negatives.OBJECTIVES)
def test_every_objective_makes_sense(name: str) -> None:
    load_config("recipes/quickstart.yaml", compare_negatives.OBJECTIVES[name])
