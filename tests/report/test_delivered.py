"""The report of a run that delivers something else than its model."""

from __future__ import annotations

import json

import pytest

from tests.report.test_intervals import draw, measure
from tests.report.test_page import parse, report
from turbogr.evaluation.metrics import ranking_metrics
from turbogr.report.comparison import Comparison
from turbogr.report.page import write_report
from turbogr.report.run_data import RunData
from turbogr.report.scores import scores_of


def deliver(run, label, *names):
    parts = [{"name": name, "weight": 1.0, "share": 1 / len(names), "settings": {}} for name in names]
    record = {"label": label, "components": parts, "values": {}, "chosen_on": "the validation items"}
    (run / "delivered.json").write_text(json.dumps(record))


@pytest.fixture
def systems():
    return {"delivered": draw(5, -2), "model": draw(0, -1), "popularity": draw(1, 1), "ease": draw(2, 0)}


def text_of(run):
    return " ".join(parse(write_report(run).read_text(encoding="utf-8")).text.split())


def test_the_headline_is_of_what_is_delivered_with_the_models_own_beside_it(run_folder, systems):
    measure(run_folder, systems)
    deliver(run_folder, "60% hstu + 40% EASE", "model", "ease")
    text = text_of(run_folder)
    values = {name: ranking_metrics(positions)["hr@10"] for name, positions in systems.items()}
    assert f"60% HSTU + 40% EASE puts the next item in its top 10 for {100 * values['delivered']:.1f} %" in text
    assert "is 60% HSTU + 40% EASE: it was best on the validation items." in text
    assert f"HSTU alone has HR@10 {100 * values['model']:.1f} %." in text
    assert "The difference is the delivered HR@10 minus that of the method" in text
    (scores,) = scores_of(RunData.read(run_folder))
    assert list(scores.systems) == ["delivered", "model", "popularity", "ease"]
    assert scores.main_values["hr@10"] == values["delivered"] and list(scores.baselines) == ["popularity", "ease"]
    assert scores.difference("hr@10", "ease")[0] == pytest.approx(values["delivered"] - values["ease"])
    assert scores.difference("hr@10", "model")[0] == pytest.approx(values["delivered"] - values["model"])


def test_a_simple_method_that_is_delivered_is_not_compared_with_itself(run_folder, systems):
    measure(run_folder, systems | {"ease": systems["delivered"]})
    deliver(run_folder, "EASE", "ease")
    text = text_of(run_folder)
    assert "EASE puts the next item in its top 10" in text
    assert "does not beat" not in text and "1.00×" not in text
    measure(run_folder, systems | {"delivered": systems["ease"], "popularity": systems["delivered"]})
    assert "What is delivered does not beat the most popular items by HR@10." in text_of(run_folder)


def test_a_run_whose_model_is_delivered_has_the_page_as_before(run_folder, systems):
    del systems["delivered"]
    measure(run_folder, systems)
    before = text_of(run_folder)
    deliver(run_folder, "hstu", "model")
    assert text_of(run_folder) == before and "deliver" not in before
    (scores,) = scores_of(RunData.read(run_folder))
    assert scores.main == "model" and scores.main_values == scores.systems["model"]


def test_the_summary_is_read_with_both(run_folder, systems):
    measured = {name: ranking_metrics(positions) for name, positions in systems.items()}
    (run_folder / "evaluation.json").unlink()
    (run_folder / "summary.json").write_text(
        json.dumps(
            {
                "step": 850,
                "part": "test",
                "num_users": 900,
                "protocol": {"text": "leave-two-out"},
                "metrics": measured["delivered"],
                "model_metrics": measured["model"],
                "standard_errors": {"hr@10": 0.01},
                "model_standard_errors": {"hr@10": 0.02},
                "baselines": {"ease": measured["ease"]},
                "baselines_refused": {"item-knn": "too many <events>"},
            }
        )
    )
    deliver(run_folder, "EASE", "ease")
    (scores,) = scores_of(RunData.read(run_folder))
    assert scores.systems == {name: measured[name] for name in ("delivered", "model", "ease")}
    assert scores.errors["model"] == {"hr@10": 0.02} and scores.errors["delivered"] == {"hr@10": 0.01}
    assert "Not compared with item neighbours: too many <events>." in text_of(run_folder)
    html = write_report(run_folder).read_text(encoding="utf-8")
    assert "too many <events>" not in html


def test_runs_are_compared_by_what_they_deliver(run_folder, systems, tmp_path):
    import shutil

    other = shutil.copytree(run_folder, tmp_path / "other")
    measure(run_folder, systems)
    deliver(run_folder, "EASE", "ease")
    measure(other, {"model": systems["model"]})
    page = Comparison.read([run_folder, other])
    first, second = page.runs
    values = {name: ranking_metrics(positions)["hr@10"] for name, positions in systems.items()}
    assert page.scores[first].main_values["hr@10"] == values["delivered"]
    assert page.scores[second].main_values["hr@10"] == values["model"]
    assert page.difference(second, "hr@10")[0] == pytest.approx(values["model"] - values["delivered"])


def test_damaged_files_are_named_and_the_page_is_shown(run_folder, systems):
    measure(run_folder, systems)
    (run_folder / "delivered.json").write_text("{")
    text = text_of(run_folder)
    assert "delivered.json cannot be read" in text and "delivered puts the next item" in text
    assert report(run_folder)
