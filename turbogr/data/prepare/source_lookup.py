"""Sources by name, built-in ones and those of plug-ins, and the options that each takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from turbogr import plugins
from turbogr.config import parse, read_value
from turbogr.data.prepare.source import OF_TEXT_FILES, Source
from turbogr.data.prepare.sources.plugin_source import plugin_source
from turbogr.errors import UserError, did_you_mean

OF_EVERY_SOURCE = (
    "split",
    "min_user_events",
    "min_item_events",
    "duplicates",
    "ties",
    "extend",
    "overwrite",
    "threads",
    "progress",
    "plugins",
)
_TAKEN = (*OF_TEXT_FILES, *OF_EVERY_SOURCE, "source", "paths", "out", "log")


def source_names() -> list[str]:
    """Return the names of all sources, built-in ones first."""
    return plugins.names("source")


def built_in_sources() -> list[Source]:
    """Return the sources of this package."""
    return [find_source(name) for name in plugins.built_in_names("source")]


def find_source(name: str) -> Source:
    """Return the source called `name`.

    Raises:
        UserError: there is none, or an option of its own has the name of an option of `prepare`.
    """
    component = plugins.find("source", name)
    source = component.factory if isinstance(component.factory, Source) else plugin_source(component)
    if component.origin != "turbogr":
        source = dataclasses.replace(source, plugin=component.record())
    for option in source.own_names:
        if option in _TAKEN:
            raise UserError(f"the source {name!r} has an option {option!r}, which `prepare` has already; rename it")
    return source


def check_options(source: Source, given: Iterable[str]) -> None:
    """Raise UserError for the first of the `given` options that the source does not use."""
    takes = (*source.takes, *source.own_names)
    for name in given:
        if name not in takes:
            listed = ", ".join(_flag(source, option) for option in takes)
            hint = "" if name in _options_of_built_in_sources() else did_you_mean(name, (*takes, *OF_EVERY_SOURCE))
            raise UserError(
                f"{_flag(source, name)} is not an option of the source {source.name!r}, which takes {listed} beside "
                f"the options of every source.{hint}"
            )


def own_options(source: Source, given: Mapping[str, Any]) -> Any:
    """Build the options that the source alone has, with its defaults for those that are not given or None.

    Raises:
        UserError: one is not an option of the source, or a value has the wrong type or is out of range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    check_options(source, given)
    if source.config is None:
        return None
    options: Any = parse(source.config, given, f"source {source.name!r}")
    if hasattr(options, "check"):
        options.check()
    return options


def read_options(source: Source, settings: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` texts of `--option` as options of the source; text for a text option is taken as it is.

    Raises:
        UserError: a text without "=", or one that cannot be read.
    """
    hints = {} if source.config is None else get_type_hints(source.config)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"cannot read --option {setting}; write it as key=value")
        key = key.strip().replace("-", "_")
        is_text = str in (hints.get(key), *get_args(hints.get(key)))
        values[key] = text if is_text else read_value(text, setting, option="--option")
    return values


def _options_of_built_in_sources() -> set[str]:
    return {*OF_TEXT_FILES, "log", *(name for source in built_in_sources() for name in source.own_names)}


def _flag(source: Source, option: str) -> str:
    if source.plugin is not None and option not in OF_TEXT_FILES:
        return f"--option {option}"
    return f"--{option.replace('_', '-')}"
