"""Choosing columns: which one is the user, the item and the time, by name or guessed from the usual names."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.prepare.source import NO_COLUMN, Columns, ReadOptions, RecordFilter
from turbogr.errors import UserError, did_you_mean, excerpt

_ALIKE = 0.75

# Per role, tiers of names; a later tier counts only where an earlier one has no match.
_USUAL = {
    "user": (
        "user userid uid userno usernum reviewerid customerid visitorid memberid accountid profileid viewerid",
        "session sessionid deviceid cookieid",
    ),
    "item": (
        "item itemid iid movieid videoid productid asin parentasin trackid songid artistid articleid newsid bookid "
        "gameid photoid documentid docid contentid skuid sku goodsid businessid listingid offerid showid",
        "movie video product track song article book game",
    ),
    "time": (
        "timestamp timestampms time timems timesec timestamps ts datetime date createdat eventtime eventtimestamp "
        "unixtime unixreviewtime unixtimestamp interactiontime clicktime viewtime ratedat",
        "reviewtime day",
    ),
}


def choose_columns(
    names: Sequence[str], options: ReadOptions, where: str, *, filters: tuple[RecordFilter, ...] = ()
) -> Columns:
    """Choose the user, the item and the time among the columns `names` of an input, called `where` in messages.

    Raises:
        UserError: there are no columns, a named one does not exist, or none or several look right.
    """
    if not names:
        raise UserError(f"{where} has no columns")
    user = _choose("user", options.user_column, names, where)
    item = _choose("item", options.item_column, names, where)
    time = _choose("time", options.time_column, names, where)
    for action in options.keep_columns:
        _check_exists(action, names, where, "--keep-columns")
    filters += tuple(parse_condition(text) for text in options.where)
    columns = Columns(user, item, None if time == NO_COLUMN else time, options.keep_columns, filters)
    check_columns(columns, names, where)
    if len({columns.user, columns.item, columns.time}) < 3:
        raise UserError(f"{where}: user, item and time must be three different columns")
    return columns


_COMPARISONS: dict[str, Any] = {
    "==": np.equal,
    "!=": np.not_equal,
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
}


def parse_condition(text: str) -> RecordFilter:
    """Read "rating >= 4" as a filter on records; a missing value never fulfils a condition.

    Raises:
        UserError: it is not a column, a comparison and a number.
    """
    match = re.fullmatch(r"\s*(.+?)\s*(==|!=|>=|<=|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*", text)
    try:
        if match is None:
            raise ValueError
        name, comparison, bound = match.group(1), _COMPARISONS[match.group(2)], float(match.group(3))
    except ValueError:
        raise UserError(f"cannot read the condition {text!r}; write it like --where 'rating >= 4'") from None

    def keep(columns: dict[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
        values = columns[name]
        return np.asarray(comparison(values, bound) & ~np.isnan(values))

    return RecordFilter(f"not {name} {match.group(2)} {match.group(3)}", (name,), keep)


def check_columns(columns: Columns, names: Sequence[str], where: str) -> None:
    """Raise UserError where a chosen column is missing from `names`."""
    for name in columns.names:
        _check_exists(name, names, where, None)


def refuse_doubled(names: Sequence[str], where: str) -> None:
    """Raise UserError where two columns have the same name, needed or not; blank names do not count."""
    for name, count in Counter(names).items():
        if count > 1 and name:
            raise UserError(f"{where}: {count} columns are called {excerpt(name)}; rename or drop all but one")


def looks_like_header(fields: Sequence[str]) -> bool:
    """Whether a line names a column that is usually called so, rather than holding values."""
    usual = {name for tiers in _USUAL.values() for tier in tiers for name in tier.split()}
    return any(_plain(field) in usual for field in fields)


def _choose(role: str, named: str | None, names: Sequence[str], where: str) -> str:
    if named is not None:
        if not (role == "time" and named == NO_COLUMN):
            _check_exists(named, names, where, f"--{role}-column")
        return named
    for tier in _USUAL[role]:
        usual = set(tier.split())
        found = [name for name in dict.fromkeys(names) if _plain(name) in usual]
        if len(found) > 1:
            listed = " and ".join(excerpt(name) for name in found)
            raise UserError(f"{where}: {listed} both look like the {role}; say which with --{role}-column")
        if found:
            return found[0]
    remedy = ", or --time-column none if the records are in time order" if role == "time" else ""
    hint = _nearest_to_usual(role, names)
    if any(re.fullmatch(r"[-+0-9.eE:T ]+", name) for name in names):
        hint = " Is the first line no header? Then name the columns with --column-names."
    raise UserError(
        f"{where}: no column looks like the {role} among {_listed(names)}; name it with --{role}-column{remedy}.{hint}"
    )


def _nearest_to_usual(role: str, names: Sequence[str]) -> str:
    """Suggest the column whose name is most like a usual one."""
    usual = [name for tier in _USUAL[role] for name in tier.split()]
    likeness = {
        name: max(difflib.SequenceMatcher(None, _plain(name), other).ratio() for other in usual) for name in names
    }
    best = max(likeness, key=lambda name: likeness[name])
    return f" Did you mean --{role}-column {best[:80]}?" if likeness[best] >= _ALIKE else ""


def _check_exists(name: str, names: Sequence[str], where: str, option: str | None) -> None:
    if name not in names:
        said = f" ({option})" if option else ""
        hint = did_you_mean(name, names)
        raise UserError(f"{where}: there is no column {name!r}{said} among {_listed(names)}.{hint}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(excerpt(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
