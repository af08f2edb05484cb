"""Checks that the folder of a cell is free for its run, or has that run and no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from turbogr.config import Config, current_key, load_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.sweep.grid import Cell
from turbogr.training.resuming import refusals, with_stored_choices
from turbogr.training.run import resolve_against
from turbogr.training.run_summary import is_outdated

_MAY_GROW = {"train.epochs", "train.steps"}


def config_of(cell: Cell, store: Store, out: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that a cell is trained with on a store, or continued if its run is in `out` already.

    Raises:
        UserError: a recipe or setting that cannot be trained.
    """
    config = load_config(cell.recipe, [*overrides, *cell.overrides])
    return resolve_against(with_stored_choices(config, out / cell.name), store)


def check_folder(cell: Cell, out: Path, config: Config, store: Store) -> None:
    """Check that the run of a cell can be started in its folder, or resumed there; it may be trained longer.

    Raises:
        UserError: the folder has something else in it, has other runs in it, or is inside a run.
    """
    folder = out / cell.name
    for outer in (out / parent for parent in Path(cell.name).parents):
        if _is_run(outer):
            raise UserError(
                f"{outer} is a run itself, and {folder} would be inside it; choose another --out, or move the run"
            )
        if outer.exists() and not outer.is_dir():
            raise UserError(f"{outer} is a file, and {folder} would be inside it; choose another --out")
    if folder.is_dir() and not _is_run(folder):
        for inner in sorted(entry.name for entry in folder.iterdir() if _is_run(entry)):
            raise UserError(
                f"{folder} has runs of a sweep with --grid or --variant in it, such as {inner}, and would be a run "
                "itself; choose another --out, or give that --grid or --variant again"
            )
    for refusal in refusals(folder, config, store, fixed=_given(cell.overrides) - _MAY_GROW):
        raise UserError(f"{folder} was {refusal.reason}; {refusal.remedy} in another --out")


def misplaced(cells: Sequence[Cell], data: Path, out: Path, overrides: Sequence[str] = ()) -> dict[Cell, list[str]]:
    """Return the cells whose folders have runs of other data or settings, or metrics by an older rule, and the reasons.

    Such runs may have been put there by hand.

    Raises:
        UserError: a recipe, setting or store that cannot be trained.
    """
    store = Store.open(data)
    found: dict[Cell, list[str]] = {}
    for cell in cells:
        folder = out / cell.name
        if not (folder / "config.yaml").exists() or not _is_run(folder):
            continue
        config = config_of(cell, store, out, overrides)
        different = refusals(folder, config, store, fixed=_given([*overrides, *cell.overrides]))
        reasons = [refusal.reason for refusal in different]
        if is_outdated(folder):
            reasons.append(
                "measured when a repeated item was not yet missed (without --compare-only it is measured again)"
            )
        if reasons:
            found[cell] = reasons
    return found


def _given(overrides: Sequence[str]) -> set[str]:
    """Return the keys that are given a value other than null; a null value follows from other settings."""
    values = {current_key(key.strip()): value for key, _, value in (override.partition("=") for override in overrides)}
    return {key for key, value in values.items() if yaml.safe_load(value) is not None}


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").exists()
