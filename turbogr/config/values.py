"""From YAML values to typed ones, strictly: the one place where settings are converted, of recipes and of `--set`."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

import yaml

from turbogr.errors import UserError, did_you_mean

_T = TypeVar("_T")


def read_value(text: str, setting: str, *, option: str = "--set") -> Any:
    """Read the value of `--set key=value` as YAML; empty text is None. `setting` is the whole, for error messages."""
    try:
        return yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError as error:
        raise UserError(f"cannot read the value '{text}' in {option} {setting}") from error


def parse(cls: type[_T], tree: Mapping[str, Any], where: str) -> _T:
    """Build a dataclass from nested mappings, strictly; `where` names the place in error messages.

    Fields with the metadata `derived` are no keys.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("derived")]  # type: ignore[arg-type]
    values = {}
    for key, value in tree.items():
        if key not in names:
            raise UserError(
                f"unknown key '{key}' in {where}.{did_you_mean(str(key), names)} Known keys: {', '.join(names)}."
            )
        values[key] = convert(hints[key], value, f"{where}: {key}" if _is_section(hints[key]) else key, where)
    return cls(**values)


def convert(hint: Any, value: Any, key: str, where: str) -> Any:
    """Convert a YAML value to the type of a field, or raise UserError with the key and what it takes."""
    if dataclasses.is_dataclass(hint):
        return parse(typing.cast(type, hint), as_mapping({} if value is None else value, key), key)
    origin = typing.get_origin(hint)
    if origin is dict:
        return _convert_entries(typing.get_args(hint)[1], value, key)
    if origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None:
            return None
        return convert(options[0], value, key, where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(
                f"{where}: {key} is '{value}'; choose from {', '.join(map(str, choices))}."
                f"{did_you_mean(str(value), choices)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(key, value, f"a list such as [{value}]", where)
        items = typing.get_args(hint)
        if Ellipsis not in items and len(items) != len(value):
            raise _wrong_type(key, value, f"a list of {len(items)}", where)
        return tuple(convert(items[0], item, key, where) for item in value)
    return _convert_scalar(hint, value, key, where)


def as_mapping(value: Any, where: str) -> dict[str, Any]:
    """Return `value` if it is a mapping, else raise UserError."""
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping of keys to values, got {type(value).__name__}")
    return value


def plain(value: Any) -> Any:
    """Return `value` as YAML and JSON can write it without tags: tuples become lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or typing.get_origin(hint) is dict


def _convert_entries(hint: Any, value: Any, where: str) -> dict[str, Any]:
    """Convert a mapping from names of the user's choice to values of one type."""
    entries = {}
    for name, entry in as_mapping({} if value is None else value, where).items():
        if not isinstance(name, str):
            raise UserError(f"{where} takes names as keys, got {name!r}; write it in quotes")
        entries[name] = convert(hint, entry, f"{where}.{name}", where)
    return entries


def _convert_scalar(hint: type, value: Any, key: str, where: str) -> Any:
    if isinstance(value, hint) and (hint in (bool, str) or (hint is int and not isinstance(value, bool))):
        return value
    if hint in (int, float) and not isinstance(value, bool):
        # YAML reads 1e-3 as text; only 1.0e-3 is a number to it
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if hint is float and math.isfinite(number):
            return number
        if hint is int and number.is_integer():
            return int(number)
    kinds = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    raise _wrong_type(key, value, kinds[hint], where)


def _wrong_type(key: str, value: Any, wanted: str, where: str) -> UserError:
    return UserError(f"{where}: {key} takes {wanted}, got {value!r}")
