"""Benchmarks: one module per claim, all saving the same small record.

A benchmark is a module of this folder with

    a docstring         first line: what is measured; then "Claim:", "Compared with:" and "Keys:" (of the record)
    SETTINGS: dict      every setting with its default; `--set key=value` changes one, parsed to the default's type
    run(settings)       measures and returns a `record.Result` (or just its figures)

A benchmark of more than a few cases measures each through `_journal.measured`, so that an interruption loses one. Its
name is the module's name. Modules that start with an underscore, and `record`, are not benchmarks.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from turbogr.bench._journal import Journal, using
from turbogr.bench.record import Record, Result, parse_settings, summarise
from turbogr.errors import UserError, did_you_mean
from turbogr.machine import machine_facts, versions

__all__ = ["Journal", "Record", "Result", "describe", "docstring", "load", "names", "open_journal", "run_benchmark"]


def names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name != "record" and not name.startswith("_"))


def describe(name: str) -> str:
    """Return the first line of a benchmark's docstring, without importing it (its imports may be optional)."""
    return docstring(name).partition("\n")[0]


def docstring(name: str) -> str:
    """Return a benchmark's docstring, without importing it."""
    source = Path(__path__[0], f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def load(name: str) -> ModuleType:
    """Import the benchmark called `name`.

    Raises:
        UserError: there is no such benchmark; names the nearest.
    """
    known = names()
    if name not in known:
        raise UserError(f"there is no benchmark '{name}'; choose from {', '.join(known)}.{did_you_mean(name, known)}")
    return importlib.import_module(f"turbogr.bench.{name}")


def open_journal(name: str, assignments: list[str] | None, record: Path | str) -> Journal:
    """Open the journal of a benchmark that will be recorded in the file `record`.

    Raises:
        UserError: an unknown benchmark or setting, a value that does not fit, or a journal of something else.
    """
    from turbogr.parallel.consistency import code_hash  # not for the processes that measure

    facts = {"settings": _settings(name, assignments), "machine": machine_facts(), "versions": versions()}
    identity = {f"{kind}.{key}": value for kind, values in facts.items() for key, value in values.items()}
    path = Path(record)
    return Journal(path.with_name(f"{path.stem}.partial.json"), {"benchmark": name, **identity, "code": code_hash()})


def run_benchmark(
    name: str, assignments: list[str] | None = None, *, command: str = "", journal: Journal | None = None
) -> tuple[Record, Result]:
    """Run a benchmark with `key=value` assignments over its default settings; return its record and full result.

    Cases that the journal has are not measured again.

    Raises:
        UserError: an unknown benchmark or setting, a value that does not fit, or a case that could not be measured.
    """
    settings = _settings(name, assignments)
    with using(journal or Journal()):
        outcome = load(name).run(settings)
    result = outcome if isinstance(outcome, Result) else Result(figures=outcome)
    return summarise(name, result, settings, command=command), result


def settings_of(name: str, assignments: list[str] | None) -> dict[str, Any]:
    """Return a benchmark's settings with `key=value` assignments applied.

    Raises:
        UserError: an unknown benchmark or setting, or a value that does not fit.
    """
    return _settings(name, assignments)


def _settings(name: str, assignments: list[str] | None) -> dict[str, Any]:
    defaults: Mapping[str, Any] = getattr(load(name), "SETTINGS", {})
    return parse_settings(name, defaults, assignments or [])
