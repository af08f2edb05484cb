"""The section about recommendations: what some users did, what they did next, and what the model recommended."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.section import Section
from turbogr.runs import Record

_NUM_OPEN_SAMPLES = 6
_NUM_TITLED_EVENTS = 10  # titles are long
_EARLIEST_DATE = 10**8  # smaller times are not seconds since 1970 but a count of the log's own


def recommendations(run: RunData) -> Section | None:
    """Some users' histories, next items and recommendations; None if the run's task recommends nothing."""
    if run.samples is None and ((run.path / "evaluation.json").exists() or run.predicts_actions):
        return None  # `turbogr evaluate` writes samples.json beside it for a task that recommends
    titles = _titles(run)
    described = _descriptions(run)
    users = [_sample(user, _has_dates(run.samples or []), titles, described) for user in run.samples or []]
    hits = sum(1 for user in users if user["hit"])
    context = {"first": users[:_NUM_OPEN_SAMPLES], "more": users[_NUM_OPEN_SAMPLES:], "hits": hits, "shown": len(users)}
    return Section("recommendations", "Recommendations", "recommendations.html", context)


def _titles(run: RunData) -> dict[str, str]:
    """Return the titles of the items of all samples, by the text of the raw id: those of the store, else the file's."""
    entries = [
        {"item": user.get("target"), "title": user.get("target_title")}
        for user in run.samples or []
        if isinstance(user.get("target"), int | str)
    ]
    for user in run.samples or []:
        entries += _objects(user.get("history")) + _objects(user.get("recommendations"))
    titles = {str(entry.get("item")): str(entry["title"]) for entry in entries if entry.get("title")}
    items = list({str(entry.get("item")): entry.get("item") for entry in entries}.values())
    if run.item_info is not None and items:
        found = run.item_info.titles_of(pa.array([str(item) for item in items]))
        titles |= {str(item): title for item, title in zip(items, found, strict=True) if title is not None}
    return titles


def _descriptions(run: RunData) -> dict[str, str]:
    """Return what the store says of targets and recommended items beside their titles, by the text of the raw id."""
    found = [user.get("target") for user in run.samples or []]
    found += [entry.get("item") for user in run.samples or [] for entry in _objects(user.get("recommendations"))]
    items = list(dict.fromkeys(map(str, found)))
    if run.item_info is None or not items:
        return {}
    return dict(zip(items, run.item_info.descriptions_of(pa.array(items, pa.string())), strict=True))


def _has_dates(users: list[Record]) -> bool:
    moments = [wording.number(user.get("target_time")) for user in users]
    return bool(moments) and all(moment >= _EARLIEST_DATE for moment in moments)


def _sample(user: Record, dated: bool, titles: dict[str, str], described: dict[str, str]) -> Record:
    target, when = user.get("target"), wording.number(user.get("target_time"))
    position = wording.number(user.get("target_rank"))
    listed = _objects(user.get("recommendations"))
    history = [
        {
            "item": entry.get("item"),
            "title": titles.get(str(entry.get("item")), ""),
            "gap": wording.gap(when - wording.number(entry.get("time"))) if dated else "",
            "moment": wording.moment(entry.get("time")) if dated else "",
            "target": entry.get("item") == target,
        }
        for entry in _objects(user.get("history"))
    ]
    shown = history[-_NUM_TITLED_EVENTS:] if any(event["title"] for event in history) else history
    return {
        "user": user.get("user"),
        "history": shown,
        "earlier": len(history) - len(shown),
        "target": target,
        "target_title": titles.get(str(target), ""),
        "target_about": described.get(str(target), ""),
        "moment": wording.moment(when) if dated else "",
        "position": wording.count(position),
        "repeated": "target_rank" in user and user["target_rank"] is None,  # so it is not a candidate
        "hit": any(entry.get("item") == target for entry in listed),
        "recommendations": [
            {
                "item": entry.get("item"),
                "title": titles.get(str(entry.get("item")), ""),
                "about": described.get(str(entry.get("item")), ""),
                "score": f"{wording.number(entry.get('score')):.3g}",
                "hit": entry.get("item") == target,
            }
            for entry in listed
        ],
    }


def _objects(values: Any) -> list[Record]:
    return [entry for entry in values if isinstance(entry, dict)] if isinstance(values, list) else []
