"""Features of events: columns of the store whose values are looked up in tables of their own.

A value v has row v + 1 of its table; row 0 stands for a value that is not given, such as in a history that a caller
hands over without it. Several features may share a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.config import Config, TableConfig
from turbogr.data.store import Store
from turbogr.errors import UserError, did_you_mean
from turbogr.tables.embedding_tables import ITEM, TableSpec

_VALUES_AT_ONCE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature that batches carry: the store's `column`, and the `table` with rows of width `dim`."""

    name: str
    column: str
    table: str
    dim: int


def features_of(config: Config) -> list[Feature]:
    """Return the features of a resolved config, in the order of the recipe."""
    assert config.model.dim is not None, "resolve the config first"
    found = []
    for name, feature in config.features.items():
        table = feature.table or name
        dim = config.tables.get(table, TableConfig()).dim or config.model.dim
        found.append(Feature(name, feature.column or name, table, dim))
    return found


def table_specs(config: Config, num_items: int) -> list[TableSpec]:
    """Return the table of the items and those of the features of a resolved config."""
    assert config.model.dim is not None, "resolve the config first"
    specs = [_spec(config, ITEM, num_items, config.model.dim)]
    for feature in features_of(config):
        if feature.table not in {spec.name for spec in specs}:
            rows = config.tables[feature.table].rows
            assert rows is not None, "resolve the config first"
            specs.append(_spec(config, feature.table, rows, feature.dim))
    return specs


def _spec(config: Config, name: str, num_rows: int, dim: int) -> TableSpec:
    table, optimizer = config.tables.get(name, TableConfig()), config.optimizer
    lr = table.lr or optimizer.table_lr or optimizer.lr
    return TableSpec(name, num_rows, dim, table.optimizer or optimizer.table, lr)


def resolve_features(config: Config, store: Store) -> Config:
    """Fill in the number of rows of every feature's table, and check the features against the store.

    Raises:
        UserError: a column that the store does not have or whose values are not whole numbers from 0 on, a table that
            is too small or that nothing uses, or a size of the item table, which follows from the data and the model.
    """
    _check_tables(config)
    rows: dict[str, int] = {}
    for name, feature in config.features.items():
        table = feature.table or name
        rows[table] = max(rows.get(table, 1), _num_rows(store, name, feature.column or name))
    tables = dict(config.tables)
    for name, needed in rows.items():
        given = tables.get(name, TableConfig())
        if given.rows is not None and given.rows < needed:
            raise UserError(
                f"tables.{name}.rows is {given.rows}, but its features have values up to {needed - 2} and one row "
                f"stands for a missing value; set it to {needed} or more, or leave it out"
            )
        tables[name] = dataclasses.replace(given, rows=given.rows or needed)
    return dataclasses.replace(config, tables=tables)


def _check_tables(config: Config) -> None:
    item = config.tables.get(ITEM, TableConfig())
    if item.rows is not None or item.dim is not None:
        raise UserError(
            "the item table has a row per item, of width model.dim; leave tables.item.rows and tables.item.dim out"
        )
    used = {ITEM, *(feature.table or name for name, feature in config.features.items())}
    for name in config.tables:
        if name not in used:
            raise UserError(
                f"no feature uses the table '{name}'; add one, such as features.{name}.column=COLUMN, or remove the "
                f"table.{did_you_mean(name, sorted(used))}"
            )
    for name, feature in config.features.items():
        if (feature.table or name) == ITEM:
            raise UserError(f"features.{name} cannot use the item table, whose rows are items; name another table")


def _num_rows(store: Store, feature: str, column: str) -> int:
    """Return how many rows a feature's table needs: one per value from 0 to the largest, and one for missing values."""
    if column not in store.actions:
        known = sorted(store.actions)
        has = f"its columns are {', '.join(known)}" if known else "it has none; keep some with `prepare --keep-columns`"
        raise UserError(
            f"features.{feature} needs the column '{column}', which {store.path} does not have; {has}."
            f"{did_you_mean(column, known)}"
        )
    largest = -1
    values = store.actions[column]
    for first in range(0, len(values), _VALUES_AT_ONCE):
        largest = max(largest, _largest(np.asarray(values[first : first + _VALUES_AT_ONCE]), store, feature, column))
    return largest + 2


def _largest(values: NDArray[Any], store: Store, feature: str, column: str) -> int:
    given = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    wrong = given[(given < 0) | (given != np.floor(given)) | (given > 2**31 - 3)]
    if len(wrong):
        raise UserError(
            f"features.{feature} needs whole numbers from 0 on, but the column '{column}' of {store.path} has "
            f"{wrong[0]:g}; number its values before `turbogr prepare`"
        )
    return int(given.max()) if len(given) else -1
