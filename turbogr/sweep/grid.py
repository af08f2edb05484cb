"""The runs of a sweep: every recipe with every combination of the grid's values."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from turbogr.errors import UserError

SEED = "train.seed"


@dataclass(frozen=True)
class Axis:
    """A key of the config, `section.key`, and the values it takes, as YAML text."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One run: a recipe, and the grid's choices as (key, value) in the order of the grid."""

    recipe: Path
    choices: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Folder of the run within the sweep, such as `hstu/dropout=0.2,seed=1`."""
        return f"{self.recipe.stem}/{self.label}" if self.choices else self.recipe.stem

    @property
    def label(self) -> str:
        return _label(self.choices)

    @property
    def overrides(self) -> list[str]:
        """The choices as `--set` takes them."""
        return [f"{key}={value}" for key, value in self.choices]

    @property
    def group(self) -> tuple[str, str]:
        """Recipe and choices other than the seed: runs of one group are repetitions of each other."""
        return self.recipe.stem, _label([choice for choice in self.choices if choice[0] != SEED])


def parse_axis(text: str) -> Axis:
    """Read `section.key=value,value,...`; a value is YAML, so a list among the values goes in brackets.

    Raises:
        UserError: no key, no value, or one value twice.
    """
    key, equals, listed = text.partition("=")
    try:
        values = yaml.safe_load(f"[{listed}]")
    except yaml.YAMLError:
        raise UserError(f"--grid {text}: cannot read the values '{listed}'") from None
    if not equals or not key.strip() or not values:
        raise UserError(f"--grid {text}: write it as section.key=value,value, e.g. train.seed=0,1,2")
    written = tuple(_write(value) for value in values)
    twice = [value for value, count in Counter(written).items() if count > 1]
    if twice:
        raise UserError(f"--grid {text}: the value {twice[0]} stands there more than once")
    return Axis(key.strip(), written)


def cells_of(recipes: Sequence[str | Path], grid: Sequence[Axis]) -> list[Cell]:
    """Return the runs, recipe by recipe, the last axis changing fastest.

    Raises:
        UserError: recipes whose files have one name, or a key that stands in the grid twice.
    """
    paths = [Path(recipe) for recipe in recipes]
    _refuse_twice(
        [path.stem for path in paths], "two recipes are named '{}': run folders take their names; rename a file"
    )
    _refuse_twice([axis.key for axis in grid], "--grid names '{}' twice; give all its values in one --grid")
    combinations = list(itertools.product(*([(axis.key, value) for value in axis.values] for axis in grid)))
    return [Cell(path, choices) for path in paths for choices in combinations]


def _refuse_twice(names: Sequence[str], message: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(message.format(name))


def _label(choices: Sequence[tuple[str, str]]) -> str:
    """Choices as text for people and paths; a key goes by its last part where that tells it from the others."""
    last = Counter(key.rpartition(".")[2] for key, _ in choices)
    short = [key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key, _ in choices]
    text = ",".join(f"{key}={value}" for key, (_, value) in zip(short, choices, strict=True))
    return text.replace("/", "_").replace(" ", "")


def _write(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
