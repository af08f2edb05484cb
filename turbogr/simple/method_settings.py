"""The sections of simple methods in a recipe: settings that are fixed there; unset ones are chosen on the validation
items when the method is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbogr.errors import UserError
from turbogr.simple.simple_method import Settings

_BELOW_OR_ONE = ("decay",)
_POSITIVE = ("l2", "neighbours", "shrinkage", "virtual")


@dataclass(frozen=True)
class _MethodSettings:
    def check(self) -> None:
        for name, value in self.fixed().items():
            is_decay = name in _BELOW_OR_ONE
            if value < 0 or (value == 0 and (is_decay or name in _POSITIVE)) or (is_decay and value > 1):
                bounds = "above 0 and at most 1" if is_decay else "positive" if name in _POSITIVE else "0 or more"
                raise UserError(f"{name} of a simple method must be {bounds}, got {value:g}")

    def fixed(self) -> Settings:
        """Return the settings that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class EaseConfig(_MethodSettings):
    """EASE: `l2` is the penalty on weights, `popularity_weight` what popularity adds to a score. What is unset is
    chosen on the validation items; so are the settings of the other simple methods.
    """

    l2: float | None = None
    popularity_weight: float | None = None


@dataclass(frozen=True)
class EaseRecencyConfig(_MethodSettings):
    """EASE in which an item of the history counts `decay` to the power of its age in events."""

    decay: float | None = None
    l2: float | None = None
    popularity_weight: float | None = None


@dataclass(frozen=True)
class ItemKnnConfig(_MethodSettings):
    """Neighbours of the items of a history, by the cosine of their users; `shrinkage` counts against rare items."""

    decay: float | None = None
    popularity_weight: float | None = None
    shrinkage: float | None = None


@dataclass(frozen=True)
class SessionKnnConfig(_MethodSettings):
    """The `neighbours` users who resemble the newest items of a history most, and what they had."""

    decay: float | None = None
    neighbours: float | None = None
    popularity_weight: float | None = None


@dataclass(frozen=True)
class SkipMarkovConfig(_MethodSettings):
    """A Markov chain over skips. `virtual` transitions of every item follow popularity; `backward` is the weight of
    what came before an item.
    """

    decay: float | None = None
    virtual: float | None = None
    backward: float | None = None


@dataclass(frozen=True)
class RecentItemsConfig(_MethodSettings):
    """A user's own items, an event counting `decay` to the power of its age."""

    decay: float | None = None


SECTIONS: dict[str, type[_MethodSettings]] = {
    "recent-items": RecentItemsConfig,
    "item-knn": ItemKnnConfig,
    "session-knn": SessionKnnConfig,
    "skip-markov": SkipMarkovConfig,
    "ease": EaseConfig,
    "ease-recency": EaseRecencyConfig,
}
"""The section of every method that has settings, by the method's name."""


def fixed_settings(method: str, options: Mapping[str, Any]) -> Settings:
    """Return the settings of a method that the sections `options` of a config fix."""
    section = options.get(method)
    return {} if section is None else section.fixed()


def unset_settings(method: str, options: Mapping[str, Any]) -> list[str]:
    """Return the settings of a method that are not set in the sections `options` of a config."""
    if method not in SECTIONS:
        return []
    fixed = fixed_settings(method, options)
    return [field.name for field in dataclasses.fields(SECTIONS[method]) if field.name not in fixed]


def with_settings(method: str, options: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the sections of a config with the settings of a method filled in."""
    return {**options, method: SECTIONS[method](**settings)} if method in SECTIONS else dict(options)
