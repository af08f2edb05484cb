"""The sections about where the result comes from: the settings, the run and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from turbogr.report import wording
from turbogr.report.run_data import RunData
from turbogr.report.section import Section

_WORDS = {
    "cpu": "CPU",
    "isa": "instruction sets",
    "memory_bytes": "memory",
    "peak_flops": "100 % of MFU",
    "fma_peak_flops": "fused multiply-adds",
    "gemm_peak_flops": "matrix product",
    "num_dense_parameters": "dense parameters",
    "num_table_parameters": "parameters of embedding tables",
    "peak_memory_bytes": "peak memory",
}


def settings(run: RunData) -> Section:
    """The resolved config, by section, and as the YAML that starts the same run again."""
    groups = [
        (str(name), [(str(key), written_setting(value)) for key, value in values.items()])
        for name, values in run.config.items()
        if isinstance(values, Mapping) and values
    ]
    loose = [(str(key), written_setting(value)) for key, value in run.config.items() if not isinstance(value, Mapping)]
    if loose:
        groups.append(("other", loose))
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return Section("settings", "Settings", "settings.html", {"groups": groups, "yaml": text})


def written_setting(value: Any) -> str:
    """Return a value of the config as text."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(written_setting(entry) for entry in value) or "none"
    return str(value)


def origin(run: RunData) -> Section:
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
        if value is not None and _fact(str(key), value) not in ("", wording.MISSING)
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
    return written_setting(value)
