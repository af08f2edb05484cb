"""Features: columns of the store whose values models see, and the tables in which categories are looked up.

A category v has row v + 1 of its table; row 0 stands for a value that is not given, such as in a history that a caller
hands over without it. Several features may share a table. Numbers and content vectors need no table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.config import Config, FeatureConfig, TableConfig
from turbogr.data.store import Store
from turbogr.errors import UserError, did_you_mean
from turbogr.models.feature_tower import Feature
from turbogr.tables.embedding_tables import ITEM, TableSpec

USER = "user"
"""Name of the table of users, of the tasks that have one."""

_VALUES_AT_ONCE = 1 << 22


def features_of(config: Config) -> list[Feature]:
    """Return the features of a resolved config, in the order of the recipe."""
    assert config.model.dim is not None, "resolve the config first"
    found = []
    for name, feature in config.features.items():
        kind, owner, column = feature.kind or "category", feature.owner or "event", feature.column or name
        if kind in ("category", "categories"):
            table = feature.table or name
            dim = config.tables.get(table, TableConfig()).dim or config.model.dim
            found.append(Feature(name, column, table, dim, kind, owner))
        else:
            assert feature.width is not None, "resolve the config first"
            found.append(Feature(name, column, None, feature.width, kind, owner))
    return found


def looked_up(features: Sequence[Feature]) -> list[tuple[Feature, str]]:
    """Return the features that are looked up, with their tables."""
    return [(feature, feature.table) for feature in features if feature.table is not None]


def table_specs(config: Config, num_items: int) -> list[TableSpec]:
    """Return the table of the items and those of the features of a resolved config."""
    assert config.model.dim is not None, "resolve the config first"
    specs = [_spec(config, ITEM, num_items, config.model.dim)]
    for feature, table in looked_up(features_of(config)):
        if table not in {spec.name for spec in specs}:
            specs.append(_spec(config, table, _rows_of(config, table), feature.dim))
    return specs


def user_table_spec(config: Config) -> TableSpec:
    """Return the table of users, of a resolved config; row 0 is a user that is not in the store."""
    return _spec(config, USER, _rows_of(config, USER), config.tables[USER].dim or config.model.dim or 0)


def _rows_of(config: Config, table: str) -> int:
    rows = config.tables[table].rows
    assert rows is not None, "resolve the config first"
    return rows


def _spec(config: Config, name: str, num_rows: int, dim: int) -> TableSpec:
    table, optimizer = config.tables.get(name, TableConfig()), config.optimizer
    lr = table.lr or optimizer.table_lr or optimizer.lr
    return TableSpec(name, num_rows, dim, table.optimizer or optimizer.table, lr)


def resolve_features(config: Config, store: Store, *, use_all: bool = False, with_users: bool = False) -> Config:
    """Fill in what of the features follows from the store: kinds, and the number of rows of every table.

    With `use_all`, every feature of the store is used where the config names none and does not say otherwise.
    With `with_users` there is a table of users.

    Raises:
        UserError: a column that the store does not have or whose values are not whole numbers from 0 on, a table that
            is too small or that nothing uses, or a size of the item table, which follows from the data and the model.
    """
    config = _with_named_features(config, store, use_all)
    _check_tables(config, with_users)
    rows: dict[str, int] = {}
    features = {name: _known_feature(store, name, feature) for name, feature in config.features.items()}
    for name, feature in features.items():
        if feature.kind in (None, "category", "categories"):
            table = feature.table or name
            rows[table] = max(rows.get(table, 1), _num_rows(store, name, feature.column or name))
        elif feature.table is not None:
            raise UserError(
                f"features.{name} is a {feature.kind} of {store.path}, which is not looked up; leave "
                f"features.{name}.table out"
            )
    if with_users:
        rows[USER] = store.num_users + 1
    tables = dict(config.tables)
    for name, needed in rows.items():
        given = tables.get(name, TableConfig())
        if given.rows is not None and given.rows < needed:
            what = "there are" if name == USER else "its features have values up to"
            raise UserError(
                f"tables.{name}.rows is {given.rows}, but {what} {needed - (1 if name == USER else 2)}"
                f"{' users' if name == USER else ''} and one row stands for a missing value; set it to {needed} or "
                "more, or leave it out"
            )
        tables[name] = dataclasses.replace(given, rows=given.rows or needed)
    return dataclasses.replace(config, tables=tables, features=features)


def _with_named_features(config: Config, store: Store, use_all: bool) -> Config:
    """Name all features of the store where these are wanted, and drop those that are left out."""
    features = dict(config.features)
    wanted = config.data.features
    if wanted == "all" or (wanted is None and use_all and not features):
        taken = {_key_of(store, name, feature) for name, feature in features.items()}
        keys = [key for key, column in store.features.items() if column.owner != "action" and key not in taken]
        names = [key.partition(".")[2] for key in keys]
        reserved = {ITEM, USER, "counts", *features}
        for key, name in zip(keys, names, strict=True):
            short = name if names.count(name) == 1 and name not in reserved else key
            features[short] = FeatureConfig(column=key)
    for name in config.data.without_features:
        found = [own for own, feature in features.items() if name in (own, feature.column)]
        known = [key for key, column in store.features.items() if column.owner != "action"]
        if not found and store.feature_key(name) not in known:
            listed = ", ".join(known) or "no features"
            raise UserError(
                f"data.without_features names '{name}', which is no feature of {store.path}; it has {listed}."
                f"{did_you_mean(name, known)}"
            )
        for own in found:
            del features[own]
    return dataclasses.replace(config, features=features)


def _key_of(store: Store, name: str, feature: FeatureConfig) -> str:
    column = feature.column or name
    return store.feature_key(column) or column


def _known_feature(store: Store, name: str, feature: FeatureConfig) -> FeatureConfig:
    """Return a feature with what the store says of it; a kept column stays as it is."""
    key = _key_of(store, name, feature)
    column = store.features.get(key)
    if column is None:
        return feature
    if column.owner == "action":
        raise UserError(
            f"features.{name} is the action '{column.name}', which is not known when an item is shown; actions of "
            "earlier events are inputs by ranking.inputs. Leave the feature out"
        )
    kind, owner = column.info.kind, column.owner
    width = column.info.width if kind in ("number", "vector") else None
    assert kind != "binary" and owner in ("event", "item", "user"), key
    return dataclasses.replace(feature, column=key, kind=kind, owner=owner, width=width)  # type: ignore[arg-type]


def _check_tables(config: Config, with_users: bool) -> None:
    item = config.tables.get(ITEM, TableConfig())
    if item.rows is not None or item.dim is not None:
        raise UserError(
            "the item table has a row per item, of width model.dim; leave tables.item.rows and tables.item.dim out"
        )
    own = {ITEM, USER} if with_users else {ITEM}
    used = {*own, *(feature.table or name for name, feature in config.features.items())}
    for name in config.tables:
        if name not in used:
            raise UserError(
                f"no feature uses the table '{name}'; add one, such as features.{name}.column=COLUMN, or remove the "
                f"table.{did_you_mean(name, sorted(used))}"
            )
    for name, feature in config.features.items():
        if (feature.table or name) in own:
            raise UserError(
                f"features.{name} cannot use the {feature.table or name} table, whose rows are "
                f"{feature.table or name}s; name another table"
            )


def _num_rows(store: Store, feature: str, column: str) -> int:
    """Return how many rows a feature's table needs: one per value from 0 to the largest, and one for missing values."""
    if column in store.features:
        return store.features[column].info.num_rows
    if column not in store.actions:
        known = sorted({*store.actions, *(key for key in store.features if not key.startswith("action."))})
        has = f"it has {', '.join(known)}" if known else "it has none; keep some with `prepare --keep-columns`"
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
