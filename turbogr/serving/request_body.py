"""What a request may contain: each field with its type and limit, and a sentence for what is wrong.

`SCHEMAS` describes the same to machines (OpenAPI).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from turbogr.errors import did_you_mean
from turbogr.exports.standalone import RequestError, shown


@dataclass(frozen=True)
class Limits:
    """The largest requests that are answered; larger ones get a 4xx with a sentence."""

    body_bytes: int = 1 << 20
    histories: int = 64
    events: int = 10_000
    k: int = 1000
    filter_items: int = 10_000


@dataclass(frozen=True)
class RecommendBody:
    """The body of POST /recommend; either `histories` or `users`."""

    histories: list[Any] | None = None
    users: list[Any] | None = None
    k: int = 10
    at: Any = None
    include: list[Any] | None = None
    exclude: list[Any] | None = None
    filter_seen: bool | None = None

    @property
    def size(self) -> int:
        return len(self.histories or self.users or ())


@dataclass(frozen=True)
class SimilarBody:
    """The body of POST /similar."""

    items: list[Any] = field(default_factory=list)
    k: int = 10
    include: list[Any] | None = None
    exclude: list[Any] | None = None

    @property
    def size(self) -> int:
        return len(self.items)


def read_recommend(data: bytes, limits: Limits) -> RecommendBody:
    """Read the body of POST /recommend; RequestError says what is wrong with it."""
    body = _read(data, ("histories", "users", "k", "at", "include", "exclude", "filter_seen"))
    histories, users = _list(body, "histories", limits.histories), _list(body, "users", limits.histories)
    if (histories is None) == (users is None):
        raise RequestError("give either histories, a list of lists of items, or users, a list of ids")
    if not (histories or users):
        raise RequestError("histories and users must not be empty; give at least one")
    for number, history in enumerate(histories or ()):
        if not isinstance(history, list):
            raise RequestError(f"histories[{number}] is {shown(history)}; each history is a list of items")
        if len(history) > limits.events:
            raise RequestError(
                f"histories[{number}] has {len(history):,} events; at most {limits.events:,} are taken, send the newest"
            )
    for number, user in enumerate(users or ()):
        _check_id(user, f"users[{number}]")
    seen = body.get("filter_seen")
    if seen is not None and not isinstance(seen, bool):
        raise RequestError(f"filter_seen is {shown(seen)}; give true or false")
    return RecommendBody(histories, users, _k(body, limits), body.get("at"), *_filters(body, limits), seen)


def read_similar(data: bytes, limits: Limits) -> SimilarBody:
    """Read the body of POST /similar; RequestError says what is wrong with it."""
    body = _read(data, ("items", "k", "include", "exclude"))
    items = _list(body, "items", limits.histories)
    if not items:
        raise RequestError("give items, a list of at least one id")
    for number, item in enumerate(items):
        _check_id(item, f"items[{number}]")
    return SimilarBody(items, _k(body, limits), *_filters(body, limits))


def _read(data: bytes, known: tuple[str, ...]) -> dict[str, Any]:
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {str(error)[:80]}"
        raise RequestError(f"the body {what}") from None
    if not isinstance(body, dict):
        raise RequestError(f'the body is {shown(body)}; give an object such as {{"histories": [["item"]]}}')
    for name in body:
        if name not in known:
            raise RequestError(f"unknown field {shown(name)}.{did_you_mean(name, known)} Fields: {', '.join(known)}")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _list(body: dict[str, Any], name: str, most: int) -> list[Any] | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise RequestError(f"{name} is {shown(value)}; give a list")
    if len(value) > most:
        raise RequestError(f"{name} has {len(value):,} entries; at most {most:,} are taken in one request")
    return value


def _k(body: dict[str, Any], limits: Limits) -> int:
    k = body.get("k", 10)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= limits.k:
        raise RequestError(f"k is {shown(k)}; give a whole number from 1 to {limits.k:,}")
    return k


def _filters(body: dict[str, Any], limits: Limits) -> tuple[list[Any] | None, list[Any] | None]:
    found = []
    for name in ("include", "exclude"):
        items = _list(body, name, limits.filter_items)
        for number, item in enumerate(items or ()):
            _check_id(item, f"{name}[{number}]")
        found.append(items)
    return found[0], found[1]


def _check_id(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RequestError(f"{where} is {shown(value)}; ids are texts or numbers")


_ID = {"oneOf": [{"type": "string"}, {"type": "integer"}], "description": "a raw id of your log"}
_TIME = {"oneOf": [{"type": "number"}, {"type": "string"}], "description": "seconds since 1970 or ISO text"}
_EVENT = {"oneOf": [_ID, {"type": "array", "prefixItems": [_ID, _TIME], "minItems": 2, "maxItems": 2}]}


def schemas(limits: Limits) -> dict[str, Any]:
    """Return the JSON schemas of the bodies and answers, by name."""
    k = {"type": "integer", "minimum": 1, "maximum": limits.k, "default": 10}
    filters = {
        name: {"type": "array", "items": _ID, "maxItems": limits.filter_items, "description": meaning}
        for name, meaning in (("include", "the only candidates"), ("exclude", "items that are left out"))
    }
    history = {
        "type": "array",
        "items": _EVENT,
        "maxItems": limits.events,
        "description": "items, the oldest first, or [item, time] pairs in any order",
    }
    scored = {
        "type": "object",
        "properties": {"item": _ID, "score": {"type": "number"}, "title": {"type": ["string", "null"]}},
        "required": ["item", "score"],
    }
    ranked = {"type": "array", "items": scored, "description": "the best first"}
    return {
        "Recommend": {
            "type": "object",
            "additionalProperties": False,
            "description": "either histories or users",
            "properties": {
                "histories": {"type": "array", "items": history, "minItems": 1, "maxItems": limits.histories},
                "users": {"type": "array", "items": _ID, "minItems": 1, "maxItems": limits.histories},
                "k": k,
                "at": {**_TIME, "description": "the time of the request; by default that of the last event"},
                "filter_seen": {"type": "boolean", "description": "leave out the items of the history"},
                **filters,
            },
        },
        "Similar": {
            "type": "object",
            "additionalProperties": False,
            "required": ["items"],
            "properties": {
                "items": {"type": "array", "items": _ID, "minItems": 1, "maxItems": limits.histories},
                "k": k,
                **filters,
            },
        },
        "Lists": {
            "type": "object",
            "properties": {
                "version": {"type": "string", "description": "the export that has answered"},
                "lists": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "items": ranked,
                            "unknown": {"type": "array", "items": _ID, "description": "items that are not known"},
                        },
                    },
                },
            },
        },
        "Error": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
    }
