"""Names of options in messages: `--out` for the command line, `out=` for Python.

A message is written once, for the command line: `--out`, `--ties=random`, `turbogr train RECIPE --data DIR`. Inside a
command it is printed so, but with `--ties random`. Any other caller is a Python program, so `in_terms_of_caller` says
what the argument is called there: `out=`, `ties='random'`, `turbogr.train(recipe, data=dir)`. In a message a value
follows its option after an equals sign, or it is a placeholder in capital letters; a word after a space belongs to the
sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_FLAGS = frozenset({"resume", "overwrite", "text-ids", "drop-bad-rows"})
_ARGUMENTS = {
    "include-seen": "filter_seen=False",
    "exclude-seen": "filter_seen=True",
    "skip-unknown": "unknown='skip'",
    "include-items": "include=",
    "exclude-items": "exclude=",
    "set": "overrides=",
}
_FUNCTIONS = {"recommend": "load", "report": "write_report", "doctor": "examine", "recipes": "recipe_names"}
_QUOTED = r"'[^']*'|\"[^\"]*\""
_OPTION = re.compile(rf"(?<![\w/.-])--([a-z][a-z-]*[a-z])(?:=({_QUOTED}|[^\s;,`)]+)| [A-Z]{{2,}}\b)?")
_SETTING = re.compile(r"--set ([a-z_]+(?:\.[a-z_]+)+)=([^\s;,`)]+)")
_COMMAND = re.compile(r"`turbogr ([a-z]+)((?: [^`]*)?)`")

_depth = 0  # how many commands this process is inside of; tests call `main` in their own process


@contextmanager
def command_line() -> Iterator[None]:
    """Inside, messages are for the command line."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def in_terms_of_caller(message: str) -> str:
    """Return a message with the names of options as the caller knows them."""
    return _on_command_line(message) if _depth else in_python(message)


def in_python(message: str) -> str:
    """Return a message with the arguments and functions of Python in place of options and commands."""
    message = _COMMAND.sub(lambda found: f"`{_call(found.group(1), found.group(2))}`", message)
    message = _SETTING.sub(lambda found: f"overrides={{'{found.group(1)}': {_literal(found.group(2))}}}", message)
    return _OPTION.sub(lambda found: _argument(found.group(1), found.group(2)), message)


def _on_command_line(message: str) -> str:
    return _OPTION.sub(lambda found: found.group().replace("=", " ", 1), message)


def _argument(option: str, value: str | None) -> str:
    if option in _ARGUMENTS:
        return _ARGUMENTS[option]
    name = option.replace("-", "_")
    if option in _FLAGS:
        return f"{name}=True"
    return f"{name}=" if value is None else f"{name}={_literal(value)}"


def _literal(value: str) -> str:
    is_literal = re.fullmatch(rf"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?|{_QUOTED}", value)
    return value if is_literal else repr(value)


def _call(command: str, rest: str) -> str:
    """`train RECIPE --data DIR` -> turbogr.train(recipe, data=dir)."""
    arguments: list[str] = []
    for word in rest.split():
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            arguments.append(_argument(option, value if equals else None))
        elif arguments and arguments[-1].endswith("="):
            arguments[-1] += _name_or_text(word)
        else:
            arguments.append(_name_or_text(word))
    return f"turbogr.{_FUNCTIONS.get(command, command)}({', '.join(arguments)})"


def _name_or_text(word: str) -> str:
    """A placeholder such as PATH... is the name of an argument; anything else is a value."""
    return word.strip(".").lower() if re.fullmatch(r"[A-Z]{2,}(\.\.\.)?", word) else _literal(word)
