"""The sections about where the result comes from: the data, the settings, the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.report import wording
from turbogr.report.charts import Axis, Mark, Series, histogram, line_chart, si
from turbogr.report.distributions import Lengths, Popularity, distributions
from turbogr.report.run import Run
from turbogr.report.section import Figure, Section

_WORDS = {
    "cpu": "CPU",
    "isa": "instruction sets",
    "memory_bytes": "memory",
    "gemm_peak_flops": "GEMM peak",
    "num_dense_parameters": "dense parameters",
    "num_table_parameters": "item table parameters",
    "peak_memory_bytes": "peak memory",
}


def data(run: Run) -> Section:
    """How long histories are and how uneven popularity is, read from the store if it is still there."""
    context: dict[str, Any] = {"figures": [], "sentences": [], "missing": ""}
    try:
        store = _open(run)
    except UserError as error:
        context["missing"] = f"The distributions cannot be shown: {error}"
        return Section("data", "Data", "data.html", context)
    lengths, popularity = distributions(store)
    context["figures"] = [_lengths_figure(run, lengths), _popularity_figure(popularity)]
    context["sentences"] = _sentences(lengths, popularity)
    return Section("data", "Data", "data.html", context)


def _open(run: Run) -> Store:
    facts = run.part("data")
    if not facts.get("path"):
        raise UserError("run.json does not say where the prepared store is")
    store = Store.open(Path(str(facts["path"])))
    expected = facts.get("content_hash")
    if expected and store.manifest.content_hash != expected:
        raise UserError(f"{store.path} now holds other data than this run was trained on")
    if store.num_users == 0 or store.num_items == 0:
        raise UserError(f"{store.path} is empty")
    return store


def _lengths_figure(run: Run, lengths: Lengths) -> Figure:
    marks = [Mark(lengths.median, 0, f"median {si(lengths.median)}")]
    limit = wording.number(run.setting("model", "max_len"))
    caption = ""
    if math.isfinite(limit) and limit < lengths.longest:
        caption = f"The model reads the last {wording.count(limit)} events of a history."
    names = [_whole_range(low, high) for low, high in zip(lengths.edges, lengths.edges[1:], strict=False)]

    def draw(width: float) -> str:
        return histogram(
            lengths.edges,
            lengths.counts,
            title="Length of a user's history",
            x=Axis("events", log=True),
            y=Axis("users", zero=True),
            names=names,
            marks=marks,
            width=width,
        )

    return Figure.draw(draw, caption)


def _whole_range(low: float, high: float) -> str:
    first, last = math.ceil(low), math.floor(high)
    return f"{first:,} events" if first == last else f"{first:,} to {last:,} events"


def _popularity_figure(popularity: Popularity) -> Figure:
    curve = Series("events", popularity.ranks, popularity.counts)

    def draw(width: float) -> str:
        x = Axis("rank of the item, most popular first", log=True)
        return line_chart(
            [curve], title="Popularity of items", x=x, y=Axis("events", log=True), width=width, height=260
        )

    return Figure.draw(draw)


def _sentences(lengths: Lengths, popularity: Popularity) -> list[str]:
    head = (
        "the most popular item takes"
        if popularity.head_items == 1
        else (f"the most popular 1 % of the items ({wording.count(popularity.head_items)}) take")
    )
    sentences = [
        f"Half of the users have at most {wording.count(lengths.median)} events, the mean is {lengths.mean:,.1f} and "
        f"the longest history has {wording.count(lengths.longest)}.",
        f"Of all events, {head} {wording.share(popularity.head_share)}.",
    ]
    if popularity.unused:
        sentences.append(f"{wording.count(popularity.unused)} items of the vocabulary occur in no event.")
    return sentences


def settings(run: Run) -> Section:
    """The resolved config, by section, and as the YAML that starts the same run again."""
    groups = [
        (str(name), [(str(key), _setting(value)) for key, value in values.items()])
        for name, values in run.config.items()
        if isinstance(values, Mapping)
    ]
    loose = [(str(key), _setting(value)) for key, value in run.config.items() if not isinstance(value, Mapping)]
    if loose:
        groups.append(("other", loose))
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return Section("settings", "Settings", "settings.html", {"groups": groups, "yaml": text})


def _setting(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_setting(entry) for entry in value)
    return str(value)


def origin(run: Run) -> Section:
    """Command, times, data, machine, versions and backends of the run."""
    info = run.info
    about = {
        "command": info.get("command"),
        "recipe": info.get("recipe"),
        "status": info.get("status"),
        "started": wording.date(info.get("created")),
        "ended": wording.date(info.get("finished")),
        "TurboGR": info.get("turbogr"),
        "peak_memory_bytes": info.get("peak_memory_bytes"),
    }
    groups = [("run", _facts(about))]
    for name in ("data", "model", "machine", "versions", "backends"):
        facts = _facts(run.part(name))
        if facts:
            groups.append((name, facts))
    return Section("machine", "Run and machine", "origin.html", {"groups": groups})


def _facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (_WORDS.get(str(key), str(key).removeprefix("num_").replace("_", " ")), _fact(str(key), value))
        for key, value in values.items()
        if value is not None
    ]


def _fact(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return wording.size(value)
    if key.endswith("_flops"):
        return f"{wording.number(value) / 1e9:,.1f} GFLOP/s"
    if isinstance(value, int) and not isinstance(value, bool):
        return wording.count(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_fact(str(name), entry)}" for name, entry in value.items())
    return _setting(value)
