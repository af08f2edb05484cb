"""Write docs/guide/config.md from the config classes, so that the reference is never older than the code.

`python tools/config_reference.py` writes it (as `make format` does); a test compares it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turbogr import plugins
from turbogr.config import Config

TARGET = Path(__file__).parent.parent / "docs" / "guide" / "config.md"

_HEAD = """# Config reference

<!-- written by tools/config_reference.py; change turbogr/config/schema.py and run `make format` -->

A recipe is a YAML file with these sections, all of them optional. `--set section.key=value` on the command line wins
over the file, e.g. `--set train.epochs=5`; an empty value (`--set train.epochs=`) unsets. Unknown keys and values of
the wrong type are errors. What is unset and follows from the data is filled in and stored in `RUN/config.yaml`, from
which `turbogr train RUN/config.yaml --data DIR --out RUN2` starts the same run again.
"""

_TOP = """## version, plugins, task

`version` is that of the schema, which says what a name means; write `version: 2`. A recipe without one is of the first,
in which `model.name: fuxi-gamma` meant what is `fuxi` now, and `fuxi-beta` what is `fuxi-beta-days`: it keeps that
meaning, with a note. `plugins` are modules, or files relative to the recipe, that register components. `task` says what
is learnt. All stand at top level, beside the sections.
"""

_WITH_SECTIONS = ("task", "block", "method", "mask", "loss", "sampler", "metric")

_OPTIONS = """## Sections of components

A component that has settings of its own takes them from a section of its name, when it is chosen.
"""


def reference() -> str:
    """Return the page."""
    hints = typing.get_type_hints(Config)
    fields = [field for field in dataclasses.fields(Config) if not field.metadata.get("derived")]
    plain = [field for field in fields if _section_class(hints[field.name]) is None]
    top = "\n".join([_TOP, *_table("", Config, [field.name for field in plain])])
    sections = []
    for field in fields:
        cls = _section_class(hints[field.name])
        if cls is not None:
            named = typing.get_origin(hints[field.name]) is dict
            title = f"{field.name}.NAME" if named else field.name
            sections.append(_section(title, f"{title}.", cls))
    return "\n\n".join([_HEAD.rstrip(), top, *sections, *_option_sections()]) + "\n"


def _section(title: str, prefix: str, cls: type) -> str:
    return "\n".join([f"## {title}", "", inspect.getdoc(cls) or "", "", *_table(prefix, cls)])


def _option_sections() -> Iterator[str]:
    """The sections of the built-in components that have one."""
    found = [plugins.find(kind, name) for kind in _WITH_SECTIONS for name in plugins.built_in_names(kind)]
    sections = [(component, component.config) for component in found if component.config is not None]
    if sections:
        yield _OPTIONS.rstrip()
    for component, cls in sections:
        title = f"{component.name} ({plugins.CHOSEN_BY[component.kind]}: {component.name})"
        yield "#" + _section(title, f"{component.name}.", cls)
        for name, hint in typing.get_type_hints(cls).items():
            entry = _section_class(hint)
            if entry is not None:
                title = f"{component.name}.{name}.NAME"
                yield "##" + _section(title, f"{title}.", entry)


def _table(prefix: str, cls: type, names: list[str] | None = None) -> list[str]:
    hints = typing.get_type_hints(cls)
    lines = ["| key | takes | default |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        if names is None or field.name in names:
            lines.append(f"| `{prefix}{field.name}` | {_takes(hints[field.name], field)} | {_default(field.default)} |")
    return lines


def _section_class(hint: Any) -> type | None:
    """The dataclass of a section, or of the entries of one whose keys are names."""
    if typing.get_origin(hint) is dict:
        hint = typing.get_args(hint)[1]
    return hint if dataclasses.is_dataclass(hint) else None


def _takes(hint: Any, field: Any = None) -> str:
    kind = field.metadata.get("kind") if field is not None else None
    if kind is not None and plugins.built_in_names(kind):
        choices = ["auto"] if kind == "backend" else []
        return ", ".join(f"`{choice}`" for choice in [*choices, *plugins.built_in_names(kind)])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if type(None) in arguments:
        return _takes(next(argument for argument in arguments if argument is not type(None)))
    if origin is dict:
        entry = arguments[1]
        return f"NAME: {'its keys below' if dataclasses.is_dataclass(entry) else _takes(entry)}"
    if origin is tuple:
        plural = {"whole number": "whole numbers", "number": "numbers", "text": "names"}[_takes(arguments[0])]
        return f"list of {plural}" if Ellipsis in arguments else f"{len(arguments)} {plural}"
    return {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}[hint]


def _default(value: Any) -> str:
    if value is None or value is dataclasses.MISSING:
        return "unset"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
