"""Several runs on one page."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from tests.report.conftest import make_store, write_run
from tests.report.test_intervals import draw, measure
from tests.report.test_page import change, parse
from turbogr.cli import main
from turbogr.errors import UserError
from turbogr.evaluation.metrics import margin, paired_difference
from turbogr.report.page import write_report


@pytest.fixture
def runs(tmp_path, store):
    """Two runs on the same data, the second better and wider."""
    first, second = (write_run(tmp_path / name, store) for name in ("narrow", "wide"))
    measure(first, {"model": draw(0, 0), "markov": draw(2, 0.5)})
    measure(second, {"model": np.maximum(draw(0, 0) // 2, 1), "markov": draw(2, 0.5)})
    config = yaml.safe_load((second / "config.yaml").read_text())
    config["model"]["dim"] = 96
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    return [first, second]


def compare(runs, tmp_path):
    return parse(write_report(runs, tmp_path / "page.html").read_text(encoding="utf-8"))


def test_the_best_run_is_named_with_its_lead_user_by_user(runs, tmp_path):
    text = compare(runs, tmp_path).text
    assert "wide is best of 2 runs by HR@10" in text
    value, error = paired_difference(np.maximum(draw(0, 0) // 2, 1), draw(0, 0), "hr@10")
    lead = f"+{value:.4f} ± {margin(error, 900):.4f}"
    assert f"wide is better, compared with narrow: HR@10 {lead}, user by user." in text
    assert f"{lead} Markov chain" in text, "in the table too"
    assert text.count("reference") == 1


def test_curves_settings_and_groups_are_side_by_side(runs, tmp_path):
    tree = compare(runs, tmp_path)
    for words in (
        "HR@10 during training", "Training loss", "model.dim 64 96", "HR@10 by popularity of the next item",
        "group users narrow wide", "HR@10 against narrow",
    ):  # fmt: skip
        assert words in tree.text, words
    assert "model.num_blocks" not in tree.text, "only settings that differ"


def test_runs_of_other_data_are_not_compared_user_by_user(runs, tmp_path):
    other = write_run(tmp_path / "other", make_store(tmp_path / "other-data", num_users=800))
    measure(other, {"model": draw(5, 0)[:800]}, users=800)
    text = compare([*runs, other], tmp_path).text
    assert "Not the data of narrow, so metrics cannot be compared: other." in text
    assert "other data" in text and "compared with narrow: HR@10" in text
    assert "other is" not in text
    assert "wide is best of 2 runs" in text, "one of these two, whatever the other data gives"
    alone = compare([runs[0], other], tmp_path).text
    assert "narrow has HR@10" in alone and "best of" not in alone


def test_old_runs_and_unfinished_ones_still_give_a_page(runs, tmp_path, store):
    old = write_run(tmp_path / "old", store)
    fresh = write_run(tmp_path / "fresh", store)
    for name in ("evaluation.json", "samples.json", "metrics.jsonl"):
        (fresh / name).unlink()
    tree = compare([*runs, old, fresh], tmp_path)
    assert "old 0.3142 0.1764 0.1502 not measured" in tree.text
    assert "fresh not measured not measured not measured not measured" in tree.text
    assert "fresh has not been evaluated at its end. Evaluate it with: turbogr evaluate" in tree.text
    alone = compare([fresh, old], tmp_path).text
    assert "old has HR@10 31.4 %" in alone and "best of" not in alone
    (old / "evaluation.json").unlink()
    assert "None of these runs has been evaluated" in compare([fresh, old], tmp_path).text


def test_a_simple_method_that_no_run_beats_is_named(runs, tmp_path):
    for run in runs:
        measure(run, {"model": draw(0, 0), "markov": np.ones(900, np.int64)})
    text = compare(runs, tmp_path).text
    assert "No run beats a Markov chain (100.0 %) by HR@10." in text
    assert "wide gives every user the same HR@10 as narrow." in text


def test_another_protocol_is_said(runs, tmp_path, store):
    change(runs[1] / "evaluation.json", protocol="leave-two-out; all items; checkpoint of step 850")
    text = compare(runs, tmp_path).text
    assert "not measured by the same protocol" in text
    assert "narrow has HR@10" in text and "best of" not in text and "wide is better" not in text
    third = write_run(tmp_path / "third", store)
    measure(third, {"model": draw(0, 0), "markov": draw(2, 0.5)})
    text = compare([*runs, third], tmp_path).text
    assert "is best of 2 runs" in text and "wide is best" not in text
    assert "other protocol" in text and "third gives every user the same" in text


def test_runs_of_the_same_name_have_their_folders_and_stay_text(runs, tmp_path, store):
    (tmp_path / "<i>b").mkdir()
    other = write_run(tmp_path / "<i>b" / "narrow", store)
    text = compare([runs[0], other], tmp_path).text
    assert "<i>b/narrow" in text and f"{tmp_path.name}/narrow" in text


def test_the_command_compares(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert "wide is best" in parse((tmp_path / "comparison.html").read_text()).text
    assert not (runs[0] / "report.html").exists()
    assert main(["report", *map(str, runs), "--out", "x.html"]) == 0
    assert (tmp_path / "x.html").exists()
    assert main(["report", *map(str, runs), "--data", "somewhere"]) == 2
    assert "--data names the store of one run" in capsys.readouterr().err
    assert main(["report", str(runs[0]), str(runs[0])]) == 2
    assert "is named twice" in capsys.readouterr().err
    with pytest.raises(UserError, match="no run to report on"):
        write_report([])


def test_settings_of_any_kind_are_shown(runs, tmp_path):
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    config["evaluate"]["metrics"], config["plugins"], config["features"] = [], ["a.py"], {}
    (runs[0] / "config.yaml").write_text(yaml.safe_dump(config))
    text = compare(runs, tmp_path).text
    assert "evaluate.metrics none unset" in text and "plugins a.py unset" in text
    assert json.loads((runs[0] / "evaluation.json").read_text())["step"] == 850
