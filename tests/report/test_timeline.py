"""The timeline of a run as a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plot.test_charts import parse, texts
from turbogr.plot import Axis, Span, span_chart
from turbogr.report.page import write_report
from turbogr.report.timeline_figure import last_steps


def trace(num_steps: int) -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(["load", "main"])
    ]
    for step in range(num_steps):
        spans = [(0, "load", 0, 300), (1, "dense", 0, 800), (1, "agree", 800, 200)]
        for tid, name, start, length in spans:
            place = {"ph": "X", "tid": tid, "ts": 1000 * step + start, "dur": length, "args": {"step": step}}
            events.append({"name": name, "pid": 0, **place})
    return {"traceEvents": events}


def test_the_last_steps_are_shown_from_their_start() -> None:
    spans = last_steps(trace(20))
    dense = [span for span in spans if span.kind == "dense"]
    assert [span.start for span in dense] == [0, 1, 2, 3, 4]
    assert dense[-1].text == "dense, step 20: 0.8 ms"
    assert {(span.track, span.kind) for span in spans} == {("main", "dense"), ("main", "reduce"), ("load", "load")}
    assert spans[0].track == "main"
    assert max(span.end for span in spans) == pytest.approx(4.8)


def test_what_is_no_timeline_gives_nothing() -> None:
    broken = {"traceEvents": [1, {"ph": "X", "name": "dense"}, {"ph": "X", "ts": "x", "dur": 1, "args": 3}]}
    for content in (None, {}, {"traceEvents": 3}, broken):
        assert last_steps(content) == []


def test_a_chart_has_a_track_per_thread_and_a_colour_per_kind() -> None:
    spans = [Span("main", "dense", 0, 5, "dense <1>"), Span("load", "load", 1, 2, "load")]
    root = parse(span_chart(spans, title="Steps", x=Axis("milliseconds")))
    assert {"main", "load", "dense", "milliseconds"} <= set(texts(root))
    assert "dense <1>" in [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "nothing to draw" in span_chart([], title="Steps")
    assert "nothing to draw" in span_chart([Span("a", "b", float("nan"), 1, "")], title="Steps")


def test_the_page_draws_waits_and_timeline(run_folder: Path) -> None:
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    shares = {"exposed_sparse_share": 0.1, "exposed_dense_share": 0.0, "idle_share": 0.02}
    more = {**shares, "collision_rate": 0.25, "staleness": 1}
    lines = [json.dumps({**record, **(more if record["kind"] == "train" else {})}) for record in records]
    (run_folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run_folder / "timeline.json").write_text(json.dumps(trace(10)))
    page = write_report(run_folder).read_text()
    assert "What a step waits for" in page and "embedding rows and their gradients" in page
    assert "25 % of a batch" in page and "rows were up to 1 updates old" in page
    assert "The last steps" in page and "dense, step 10: 0.8 ms" in page
    (run_folder / "timeline.json").write_text("{")
    assert "timeline.json cannot be read" in write_report(run_folder).read_text()
