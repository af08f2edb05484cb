"""Which items a call of `recommend` may return: lists for everybody, and lists of single users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.data.dataframes import ids_array, is_table
from turbogr.data.event_table import NamedColumns, column_of
from turbogr.data.histories import Unknown, report_unknown
from turbogr.data.prepare.sources.memory_table import column_names
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError

UserLists = dict[str, Int64Array]
"""Item rows by the text of a user's raw id; 5 and "5" are the same user."""


@dataclass(frozen=True)
class ItemFilters:
    """`allowed` [V] bool are the candidates of everybody (None: all items); the others are lists of single users.

    A user in `included` gets items of that list alone, one in `excluded` none of that list.
    """

    allowed: Tensor | None = None
    included: UserLists | None = None
    excluded: UserLists | None = None

    def own(self, ids: NDArray[Any], which: UserLists | None) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
        """Return the lists of users one behind the other, how long each is, and which users have one."""
        which = which or {}
        found = [which.get(_key(raw)) for raw in ids.tolist()]
        rows = [row for row in found if row is not None]
        lengths = np.array([0 if row is None else len(row) for row in found], np.int64)
        has = np.array([row is not None for row in found], bool)
        return np.concatenate([np.zeros(0, np.int64), *rows]), lengths, has

    @property
    def num_candidates(self) -> int | None:
        return None if self.allowed is None else int(self.allowed.sum())


def read_filters(
    store: Store,
    *,
    include: Any = None,
    exclude: Any = None,
    include_by_user: Any = None,
    exclude_by_user: Any = None,
    unknown: Unknown = "warn",
    columns: NamedColumns | None = None,
) -> ItemFilters:
    """Read the filters of a call. Unknown items of `exclude` mean nothing; those of `include` are reported.

    `include` and `exclude` are lists, columns or tables of raw items; `include_by_user` and `exclude_by_user` map a
    user to items, or are tables with a user and an item column.

    Raises:
        UserError: one cannot be read, or `include` has no known item.
    """
    columns = columns or NamedColumns()
    allowed = None
    if include is not None:
        rows = _item_rows(include, "include", store, unknown, columns)
        if not len(rows):
            raise UserError("include has no item that the model knows; check the ids, or leave it out")
        allowed = torch.zeros(store.num_items, dtype=torch.bool)
        allowed[torch.from_numpy(rows)] = True
    if exclude is not None:
        allowed = torch.ones(store.num_items, dtype=torch.bool) if allowed is None else allowed
        allowed[torch.from_numpy(_item_rows(exclude, "exclude", store, "skip", columns))] = False
    return ItemFilters(
        allowed,
        _user_lists(include_by_user, "include_by_user", store, unknown, columns),
        _user_lists(exclude_by_user, "exclude_by_user", store, "skip", columns),
    )


def _item_rows(items: Any, name: str, store: Store, unknown: Unknown, columns: NamedColumns) -> Int64Array:
    if isinstance(items, Mapping):
        raise UserError(f"{name} is for everybody and takes a list of items; give lists of users to {name}_by_user")
    if is_table(items):
        if len(column_names(items)) > 1 and columns.item is None:
            raise UserError(
                f"{name} is for everybody, and this table has several columns; give one column, e.g. "
                f"table['item'], or give pairs of users and items to {name}_by_user"
            )
        ids = column_of("item", items, store, columns, name)
    elif isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise UserError(f"{name} is {items!r}; give a list of items")
    else:
        ids = ids_array(items if hasattr(items, "dtype") or hasattr(items, "type") else list(items), name)
    return _known_rows(ids, name, store, unknown)


def _known_rows(ids: Any, name: str, store: Store, unknown: Unknown) -> Int64Array:
    rows = store.item_ids.encode(ids)
    report_unknown(ids, rows, unknown, f"entries of {name} are")
    return np.unique(rows[rows >= 0])


def _user_lists(lists: Any, name: str, store: Store, unknown: Unknown, columns: NamedColumns) -> UserLists | None:
    if lists is None:
        return None
    if is_table(lists):
        users = column_of("user", lists, store, columns, name).to_pylist()
        items = column_of("item", lists, store, columns, name)
        rows = store.item_ids.encode(items)
        report_unknown(items, rows, unknown, f"entries of {name} are")
        found: dict[str, list[int]] = {}
        for user, row in zip(users, rows.tolist(), strict=True):
            found.setdefault(_key(user), []).extend([row] if row >= 0 else [])
        return {user: np.unique(np.array(own, np.int64)) for user, own in found.items()}
    if not isinstance(lists, Mapping):
        raise UserError(f"{name} is {type(lists).__name__}; give a mapping from users to items, or a table of pairs")
    return {
        _key(user): _item_rows(items, f"{name}[{user!r}]", store, unknown, columns) for user, items in lists.items()
    }


def _key(raw: Any) -> str:
    return str(raw.item() if isinstance(raw, np.generic) else raw)
