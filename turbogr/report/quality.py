"""The sections about how good the model is: the headline, the metrics beside the baselines, the recommendations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from turbogr.report import wording
from turbogr.report.charts import Axis, bar_chart, grouped_bar_chart, percent
from turbogr.report.run import Record, Run
from turbogr.report.section import Figure, Section

_NAMES = {"popularity": "most popular", "markov": "Markov chain"}
_PHRASES = {"most popular": "the most popular items", "Markov chain": "a Markov chain"}
_MODEL_NAMES = {"hstu": "HSTU", "fuxi": "FuXi", "sasrec": "SASRec"}
_NUM_OPEN_SAMPLES = 6
_EARLIEST_DATE = 10**8  # smaller times are not seconds since 1970 but some count of the log's own


def model_name(run: Run) -> str:
    """Return the model's name as the literature writes it."""
    name = str(run.part("model").get("name") or run.setting("model", "name") or "model")
    return _MODEL_NAMES.get(name, name)


def metric_label(key: str) -> str:
    """Return a metric's key as people write it: hr@10 is HR@10."""
    return key.upper()


def metric_order(key: str) -> tuple[int, int, str]:
    """Sort HR before NDCG before others, by rising cut-off."""
    family, _, cut = key.partition("@")
    return ("hr", "ndcg").index(family) if family in ("hr", "ndcg") else 2, int(cut) if cut.isdigit() else 0, key


@dataclass(frozen=True)
class Scores:
    """The metrics of one held-out part: the model's, and each baseline's by name."""

    part: str
    model: dict[str, float]
    baselines: dict[str, dict[str, float]]

    @property
    def keys(self) -> list[str]:
        return sorted(self.model, key=metric_order)

    @property
    def headline(self) -> str:
        """The metric to lead with: HR@10, or the first there is."""
        return "hr@10" if "hr@10" in self.model else self.keys[0]


def scores_of(run: Run) -> list[Scores]:
    """Return the scores of every part of the evaluation that has any for the model, the test part first."""
    parts = (run.evaluation or {}).get("parts")
    if not isinstance(parts, dict):
        return []
    found = []
    for part in sorted(parts, key=lambda name: (name != "test", name)):
        systems = (
            {name: _metrics(values) for name, values in parts[part].items()} if isinstance(parts[part], dict) else {}
        )
        model = systems.pop("model", {})
        if model:
            found.append(
                Scores(part, model, {_NAMES.get(name, name): values for name, values in systems.items() if values})
            )
    return found


def _metrics(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    metrics = {str(key): wording.number(value) for key, value in values.items() if not str(key).startswith("num_")}
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def headline(run: Run) -> Section:
    """What a reader wants to know first: does the model find the next item, and how much better than no model?"""
    context: dict[str, Any] = {"model": model_name(run), "figure": None, "facts": _key_facts(run)}
    all_scores = scores_of(run)
    if all_scores:
        context.update(_result(run, all_scores[0]))
    else:
        context["latest"] = _latest(run)
    return Section("result", "Result", "headline.html", context)


def _result(run: Run, scores: Scores) -> dict[str, Any]:
    key = scores.headline
    value = scores.model[key]
    comparisons = [
        {
            "name": _PHRASES.get(name, name),
            "value": wording.share(values[key]),
            "factor": wording.times(value / values[key]) if values[key] > 0 else None,
            "better": value > values[key],
        }
        for name, values in scores.baselines.items()
        if key in values
    ]
    bars = {model_name(run): value, **{name: values[key] for name, values in scores.baselines.items() if key in values}}
    axis = Axis("share of users" if key.startswith("hr@") else "", format=wording.share, zero=True)
    slots = [0] + [5] * (len(bars) - 1)
    title = f"{metric_label(key)} on the {_part_name(scores.part)}"
    return {
        "metric": metric_label(key),
        "cut": key.partition("@")[2] if key.startswith("hr@") else "",
        "value": wording.share(value),
        "part": _part_name(scores.part),
        "num_users": _num_users(run, scores.part),
        "comparisons": comparisons,
        "beaten": [entry["name"] for entry in comparisons if not entry["better"]],
        "protocol": _protocol(run),
        "figure": Figure.draw(lambda width: bar_chart(bars, title=title, axis=axis, slots=slots, width=width)),
    }


def _latest(run: Run) -> Record | None:
    """Return the newest evaluation during training, for a run that was not evaluated at its end."""
    for record in reversed(run.evals):
        metrics = _metrics({key: value for key, value in record.items() if "@" in str(key)})
        if metrics:
            key = "hr@10" if "hr@10" in metrics else min(metrics, key=metric_order)
            return {
                "metric": metric_label(key),
                "value": wording.share(metrics[key]),
                "part": _part_name(str(record.get("part", ""))),
                "step": wording.count(record["step"]),
            }
    return None


def _part_name(part: str) -> str:
    return {"test": "test items", "valid": "validation items"}.get(part, part)


def _protocol(run: Run) -> str:
    """Return what was measured, on which checkpoint, and how many users had nothing to measure."""
    evaluation = run.evaluation or {}
    words = wording.sentence(evaluation.get("protocol"))
    if not words:
        return "The evaluation does not state its protocol, so do not compare these numbers."
    skipped = evaluation.get("skipped")
    reasons = skipped.items() if isinstance(skipped, dict) else []
    left_out = "; ".join(f"{wording.count(users)} ({reason})" for reason, users in reasons if wording.number(users) > 0)
    return f"{words} Users not measured: {left_out}." if left_out else words


def _num_users(run: Run, part: str) -> str | None:
    users = (run.evaluation or {}).get("num_users")
    if isinstance(users, dict):
        users = users.get(part)
    return wording.count(users) if math.isfinite(wording.number(users)) else None


def _key_facts(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, value, detail) of the few figures that place the result."""
    data, model = run.part("data"), run.part("model")
    facts = [
        (
            "Data",
            f"{wording.count(data.get('num_events'))} events",
            f"{wording.count(data.get('num_users'))} users, {wording.count(data.get('num_items'))} items",
        ),
        (
            "Parameters",
            wording.count(model.get("num_dense_parameters")),
            f"and {wording.count(model.get('num_table_parameters'))} in the item table",
        ),
    ]
    if run.train:
        last = run.train[-1]
        epoch = wording.number(last.get("epoch"))
        detail = f"{wording.count(last['step'])} steps" + (f", {epoch:.4g} epochs" if math.isfinite(epoch) else "")
        facts.append(("Training", wording.duration(last.get("elapsed")), detail))
        speeds = sorted(filter(math.isfinite, (wording.number(r.get("tokens_per_second")) for r in run.train)))
        shares = sorted(filter(math.isfinite, (wording.number(r.get("mfu_strict")) for r in run.train)))
        if speeds:
            busy = f"strict MFU {wording.share(shares[len(shares) // 2])}" if shares else "median"
            facts.append(("Speed", f"{wording.count(speeds[len(speeds) // 2])} tokens/s", busy))
    return facts


def metrics(run: Run) -> Section:
    """Every metric beside the baselines, with the protocol under which it was measured."""
    tables = []
    for scores in scores_of(run):
        systems = {model_name(run): scores.model, **scores.baselines}
        rows = []
        for key in scores.keys:
            values = [system.get(key, math.nan) for system in systems.values()]
            best = max((value for value in values if math.isfinite(value)), default=math.nan)
            popular = scores.baselines.get("most popular", {}).get(key, 0.0)
            rows.append(
                {
                    "metric": metric_label(key),
                    "cells": [
                        {"text": f"{v:.4f}" if math.isfinite(v) else wording.MISSING, "best": v == best} for v in values
                    ],
                    "factor": wording.times(values[0] / popular) if popular > 0 else wording.MISSING,
                }
            )
        tables.append(
            {
                "part": _part_name(scores.part),
                "num_users": _num_users(run, scores.part),
                "systems": list(systems),
                "rows": rows,
                "has_factor": "most popular" in scores.baselines,
                "figure": _comparison(scores, systems),
            }
        )
    return Section("metrics", "Metrics", "metrics.html", {"tables": tables, "protocol": _protocol(run)})


def _comparison(scores: Scores, systems: dict[str, dict[str, float]]) -> Figure:
    def draw(width: float) -> str:
        keys = scores.keys if width > 400 else _few(scores.keys)
        return grouped_bar_chart(
            [metric_label(key) for key in keys],
            {name: [system.get(key, math.nan) for key in keys] for name, system in systems.items()},
            title="Beside the baselines",
            y=Axis(format=percent, zero=True),
            width=width,
        )

    return Figure.draw(draw)


def _few(keys: list[str]) -> list[str]:
    """Return the metrics to draw where there is room for five: hit rates, the first NDCG, MRR."""
    first_ndcg = next((key for key in keys if key.startswith("ndcg@")), None)
    return [key for key in keys if key.startswith("hr@") or key in (first_ndcg, "mrr")][:5] or keys[:5]


def recommendations(run: Run) -> Section:
    """Some users: what they did, what they did next, and what the model would have shown them."""
    users = [_sample(user, _has_dates(run.samples or [])) for user in run.samples or []]
    hits = sum(1 for user in users if user["hit"])
    context = {"first": users[:_NUM_OPEN_SAMPLES], "more": users[_NUM_OPEN_SAMPLES:], "hits": hits, "shown": len(users)}
    return Section("recommendations", "Recommendations", "recommendations.html", context)


def _has_dates(users: list[Record]) -> bool:
    moments = [wording.number(user.get("target_time")) for user in users]
    return bool(moments) and all(moment >= _EARLIEST_DATE for moment in moments)


def _sample(user: Record, dated: bool) -> Record:
    target, when = user.get("target"), wording.number(user.get("target_time"))
    rank = wording.number(user.get("target_rank"))
    listed = _objects(user.get("recommendations"))
    history = [
        {
            "item": entry.get("item"),
            "gap": wording.gap(when - wording.number(entry.get("time"))) if dated else "",
            "moment": wording.moment(entry.get("time")) if dated else "",
            "target": entry.get("item") == target,
        }
        for entry in _objects(user.get("history"))
    ]
    return {
        "user": user.get("user"),
        "history": history,
        "target": target,
        "moment": wording.moment(when) if dated else "",
        "rank": wording.count(rank),
        "known": "target_rank" in user and user["target_rank"] is None,  # and so is no candidate
        "hit": any(entry.get("item") == target for entry in listed),
        "recommendations": [
            {
                "item": entry.get("item"),
                "score": f"{wording.number(entry.get('score')):.3g}",
                "hit": entry.get("item") == target,
            }
            for entry in listed
        ],
    }


def _objects(values: Any) -> list[Record]:
    return [entry for entry in values if isinstance(entry, dict)] if isinstance(values, list) else []
