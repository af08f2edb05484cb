"""Write docs/guide/config.md from the config classes, so that the reference is never older than the code.

`python tools/config_reference.py` writes it (as `make format` does); a test compares it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

from turbogr.config import Config

TARGET = Path(__file__).parent.parent / "docs" / "guide" / "config.md"

_HEAD = """# Config reference

<!-- written by tools/config_reference.py; change turbogr/config.py and run `make format` -->

A recipe is a YAML file with these sections, all of them optional. `--set section.key=value` on the command line wins
over the file, e.g. `--set train.epochs=5`; an empty value (`--set train.epochs=`) unsets. Unknown keys and values of
the wrong type are errors. What is unset and follows from the data is filled in and stored in `RUN/config.yaml`, from
which `turbogr train RUN/config.yaml --data DIR --out RUN2` starts the same run again.
"""


def reference() -> str:
    """Return the page."""
    sections = []
    for name, cls in typing.get_type_hints(Config).items():
        lines = [f"## {name}", "", inspect.getdoc(cls) or "", "", "| key | takes | default |", "|---|---|---|"]
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            lines.append(f"| `{name}.{field.name}` | {_takes(hints[field.name])} | {_default(field.default)} |")
        sections.append("\n".join(lines))
    return "\n\n".join([_HEAD.rstrip(), *sections]) + "\n"


def _takes(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if type(None) in arguments:
        return _takes(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        plural = {"whole number": "whole numbers", "number": "numbers"}[_takes(arguments[0])]
        return f"list of {plural}" if Ellipsis in arguments else f"{len(arguments)} {plural}"
    return {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}[hint]


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
