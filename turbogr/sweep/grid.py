"""The runs of a sweep: every recipe in every variant with every combination of the grid's values."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from turbogr.config import Config, parse
from turbogr.errors import UserError, excerpt

SEED = "train.seed"
LOGS = "logs"

_LONGEST_NAME = 255 - len(".log")  # bytes that file systems allow; the log's name is the longest
_RESERVED = (LOGS, "sweep.json", "sweep.svg")  # names that a sweep uses beside the folders of its recipes


@dataclass(frozen=True)
class Axis:
    """A setting `section.key` and its values, as YAML text."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """A named set of settings, as (key, value)."""

    name: str
    settings: tuple[tuple[str, str], ...]

    @property
    def slug(self) -> str:
        """The name as a part of a path."""
        return re.sub(r"[^A-Za-z0-9._+=]+", "-", self.name).strip("-.")


@dataclass(frozen=True)
class Cell:
    """One run: a recipe, a variant of it or None, and the grid's choices as (key, value) in the order of the grid."""

    recipe: Path
    choices: tuple[tuple[str, str], ...]
    variant: Variant | None = None

    @property
    def name(self) -> str:
        """Folder of the run within the sweep, such as `hstu/dropout=0.2,seed=1` or `hstu/large,seed=1`."""
        parts = [self.variant.slug if self.variant else "", _label(self.choices)]
        return "/".join(part for part in (self.recipe.stem, ",".join(filter(None, parts))) if part)

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """All settings that differ from the recipe, as (key, value)."""
        return (*(self.variant.settings if self.variant else ()), *self.choices)

    @property
    def overrides(self) -> list[str]:
        """The settings as `--set` takes them."""
        return [f"{key}={value}" for key, value in self.settings]

    @property
    def group(self) -> tuple[str, str]:
        """Recipe, and variant with all choices but the seed. Runs of one group are repetitions."""
        parts = [self.variant.name if self.variant else "", _label([c for c in self.choices if c[0] != SEED])]
        return self.recipe.stem, ", ".join(filter(None, parts))


def parse_axis(text: str) -> Axis:
    """Read `section.key=value,value,...`; a value is YAML, so a list among the values goes in brackets.

    Raises:
        UserError: no key, no value, or one value twice, also if it is written in two ways.
    """
    key, equals, listed = text.partition("=")
    try:
        values = yaml.safe_load(f"[{listed}]")
    except yaml.YAMLError:
        raise UserError(f"--grid {text}: cannot read the values '{listed}'") from None
    if not equals or not key.strip() or not values:
        raise UserError(f"--grid {text}: write it as section.key=value,value, e.g. train.seed=0,1,2")
    written = tuple(_write(value) for value in values)
    first: dict[str, str] = {}
    for value, spelt in zip(values, written, strict=True):
        other = first.setdefault(repr(_as_config(key.strip(), value)), spelt)
        if other != spelt:
            raise UserError(f"--grid {text}: {other} and {spelt} are the same value; leave one of them out")
    _refuse_twice(written, f"--grid {text}: the value {{}} is given more than once")
    return Axis(key.strip(), written)


def parse_variant(text: str) -> Variant:
    """Read `name: section.key=value, section.key=value`; without settings it is the recipe itself.

    Raises:
        UserError: no name, a setting that cannot be read, or a key that is set twice.
    """
    name, colon, listed = text.partition(":")
    # A comma ends a setting only if another setting follows: values may be lists.
    pieces = re.split(r",(?=\s*[\w.]+\s*=)", listed) if listed.strip() else []
    settings = tuple((key.strip(), value.strip()) for key, _, value in (piece.partition("=") for piece in pieces))
    variant = Variant(" ".join(name.split()), settings)
    if not colon or not variant.slug or not all(key and value for key, value in settings):
        raise UserError(
            f"--variant '{text}': write it as name: section.key=value, section.key=value, "
            "e.g. 'wide: model.dim=128, model.num_heads=4'"
        )
    _refuse_twice([key for key, _ in settings], f"--variant '{text}' sets '{{}}' twice; leave one of them out")
    return variant


def cells_of(recipes: Sequence[str | Path], grid: Sequence[Axis], variants: Sequence[Variant] = ()) -> list[Cell]:
    """Return the runs, recipe by recipe and variant by variant, the last axis changing fastest.

    Raises:
        UserError: recipes, variants or values whose folders would have one name or too long a one, or a key that is
            set twice.
    """
    paths = [Path(recipe) for recipe in recipes]
    _refuse_twice(
        [path.stem for path in paths], "two recipes are named '{}': run folders take their names; rename a file"
    )
    for path in paths:
        if path.stem in _RESERVED:
            raise UserError(
                f"{path}: a sweep writes its own '{path.stem}' where this recipe's runs would be; rename it"
            )
    _refuse_twice([axis.key for axis in grid], "--grid names '{}' twice; give all its values in one --grid")
    _refuse_twice(
        [variant.slug for variant in variants], "two variants would share the folder '{}'; give one another name"
    )
    for variant in variants:
        for key in sorted({key for key, _ in variant.settings} & {axis.key for axis in grid}):
            raise UserError(f"'{key}' is set by --grid and by the variant '{variant.name}'; leave it to one of them")
    combinations = list(itertools.product(*([(axis.key, value) for value in axis.values] for axis in grid)))
    each: Sequence[Variant | None] = variants or [None]
    cells = [Cell(path, choices, variant) for path in paths for variant in each for choices in combinations]
    _refuse_shared_folders(cells)
    _refuse_long_folders(cells)
    return cells


def _refuse_shared_folders(cells: Sequence[Cell]) -> None:
    """Raise UserError for two runs with one folder: some characters of a value are replaced in a path."""
    first: dict[str, Cell] = {}
    for cell in cells:
        other = first.setdefault(cell.name, cell)
        if other is not cell:
            one, two = (", ".join(each.overrides) for each in (other, cell))
            raise UserError(
                f"the runs with {one} and with {two} would share the folder '{cell.name}'; "
                "give these values names with --variant"
            )


def _refuse_long_folders(cells: Sequence[Cell]) -> None:
    for cell in cells:
        for part in cell.name.split("/"):
            if (size := len(part.encode())) > _LONGEST_NAME:
                remedy = "give the variant a shorter name" if cell.variant else "name its values with --variant"
                raise UserError(
                    f"the folder {excerpt(part)} of a run of {cell.recipe} would have a name of {size} bytes, and "
                    f"{_LONGEST_NAME} is the most; {remedy}, or vary fewer settings"
                )


def _refuse_twice(names: Sequence[str], message: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(message.replace("{}", name))


def _label(choices: Sequence[tuple[str, str]]) -> str:
    """Return choices as text for people and paths; a key is shortened to its last part if that is unique."""
    last = Counter(key.rpartition(".")[2] for key, _ in choices)
    short = [key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key, _ in choices]
    text = ",".join(f"{key}={value}" for key, (_, value) in zip(short, choices, strict=True))
    return text.replace("/", "_").replace(" ", "")


def _as_config(key: str, value: Any) -> Any:
    """Return the value as a config has it, so that 1e-3 and 0.001 are equal; an invalid value is left to `check`."""
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    try:
        return parse(Config, tree, "--grid")
    except UserError:
        return value


def _write(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")
