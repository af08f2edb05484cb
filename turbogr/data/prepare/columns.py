"""Choosing columns: which one is the user, the item and the time, by name or guessed from the usual names."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.prepare.feature_kinds import NamedFeature, parse_feature
from turbogr.data.prepare.source import NO_COLUMN, Columns, ReadOptions, RecordFilter
from turbogr.errors import Note, UserError, did_you_mean, excerpt, warn_caller

_ALIKE = 0.8
_SHORTEST_LIKE = 3

# Per role, tiers of names; a later tier counts only where an earlier one has no match.
_SESSIONS = "session sessionid deviceid cookieid device cookie anonymousid visitid"
_USUAL = {
    "user": (
        "user userid uid userno usernum reviewerid customerid visitorid memberid accountid profileid viewerid",
        "customer visitor member account reviewer viewer username userhash fullvisitorid cust custid client clientid "
        "student studentid pupil pupilid learner learnerid player playerid buyer buyerid shopper shopperid household "
        "householdid householdkey subscriber subscriberid listener listenerid reader readerid person personid",
        _SESSIONS,
    ),
    "item": (
        "item itemid iid movieid videoid productid asin parentasin trackid songid artistid articleid newsid bookid "
        "gameid photoid documentid docid contentid skuid sku goodsid businessid listingid offerid showid",
        "movie video product track song article book game",
        "poi poiid venue venueid place placeid problem problemid exercise exerciseid question questionid recipe "
        "recipeid restaurant restaurantid hotel hotelid course courseid app appid clip clipid job jobid post postid "
        "podcast podcastid episode episodeid anime animeid business listing show artist news photo document beer "
        "beerid stockcode itemcode productcode itemno productno isbn ean gtin upc adid pageid",
        "location locationid page",
    ),
    "time": (
        "timestamp timestampms time timems timesec timestamps ts datetime date createdat eventtime eventtimestamp "
        "unixtime unixreviewtime unixtimestamp interactiontime clicktime viewtime ratedat",
        "reviewtime day",
        "localdate localtime localdatetime utctime utctimestamp epoch epochms epochtime eventdate eventdatetime "
        "eventts checkintime visittime visitedat purchasedate purchasetime purchasedat orderdate ordertime orderedat "
        "boughtat invoicedate transactiondate transactiontime transactiontimestamp transdate transtime startedat "
        "starttime startdate listenedat playedat watchedat viewedat clickedat ratingdate ratingtime reviewdate "
        "reviewedat createtime createddate creationdate creationtime createdon occurredat servertime logtime "
        "requesttime submittedat submittime answeredat answertime dt",
        "updatedat updatetime modifiedat",
    ),
}


def choose_columns(
    names: Sequence[str], options: ReadOptions, where: str, *, filters: tuple[RecordFilter, ...] = ()
) -> Columns:
    """Choose the user, the item and the time among the columns `names` of an input, called `where` in messages.

    Raises:
        UserError: there are no columns, named ones do not exist, or none or several look right; one message for all.
    """
    if not names:
        raise UserError(f"{where} has no columns")
    filters += tuple(parse_condition(text) for text in options.where)
    _check_named(names, options, filters, where)
    found = {role: _candidates(role, _named(role, options), names) for role in _USUAL}
    _refuse_unclear(found, names, where)
    user, item, time = (columns[0] for columns in found.values())
    actions = dict(parse_action(text) for text in options.actions)
    columns = Columns(
        user,
        item,
        None if time == NO_COLUMN else time,
        tuple(dict.fromkeys([*options.keep_columns, *actions])),
        filters,
        tuple(actions),
        {name: rule for name, rule in actions.items() if rule is not None},
        _event_features(options),
    )
    if len({columns.user, columns.item, columns.time}) < 3:
        raise UserError(f"{where}: user, item and time must be three different columns")
    if options.user_column is None and _plain(user) in _SESSIONS.split():
        warn_caller(
            f"{where}: no column names a user, so {excerpt(user)} takes its place: histories do not go beyond one of "
            "these. If there is a column of users, name it with --user-column",
            Note,
        )
    return columns


_COMPARISONS: dict[str, Any] = {
    "==": np.equal,
    "!=": np.not_equal,
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
}


def parse_condition(text: str, example: str = "--where='rating >= 4'") -> RecordFilter:
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
        raise UserError(f"cannot read the condition {text!r}; write it like {example}") from None

    def keep(columns: dict[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
        values = columns[name]
        return np.asarray(comparison(values, bound) & ~np.isnan(values))

    return RecordFilter(f"not {name} {match.group(2)} {match.group(3)}", (name,), keep)


def parse_action(text: str) -> tuple[str, RecordFilter | None]:
    """Read "is_like", or "like=rating>=4" as the action "like" of records whose rating is at least 4.

    Raises:
        UserError: what follows the equals sign is no condition.
    """
    match = re.fullmatch(r"\s*([^=<>!]+?)\s*=\s*([^=].*)", text)
    if match is None or not re.search("[=<>]", match.group(2)):
        return text.strip(), None
    return match.group(1), parse_condition(match.group(2), "--actions='like=rating>=4'")


def _event_features(options: ReadOptions) -> tuple[NamedFeature, ...]:
    features = [parse_feature(text, "--event-features", several=False) for text in options.event_features]
    for name, count in Counter(feature.name for feature in features).items():
        if count > 1:
            raise UserError(f"--event-features names {excerpt(name)} {count} times; name it once")
    return tuple(features)


def check_columns(columns: Columns, names: Sequence[str], where: str) -> None:
    """Raise UserError where chosen columns are missing from `names`."""
    _refuse_absent(dict.fromkeys(columns.names), names, where)


def refuse_doubled(names: Sequence[str], where: str) -> None:
    """Raise UserError where two columns have the same name, needed or not; blank names do not count."""
    for name, count in Counter(names).items():
        if count > 1 and name:
            raise UserError(f"{where}: {count} columns are called {excerpt(name)}; rename or drop all but one")


def looks_like_header(fields: Sequence[str]) -> bool:
    """Whether a line names a column that is usually called so, rather than holding values."""
    usual = {name for tiers in _USUAL.values() for tier in tiers for name in tier.split()}
    return any(_plain(field) in usual for field in fields)


def _named(role: str, options: ReadOptions) -> str | None:
    name: str | None = getattr(options, f"{role}_column")
    return name


def _check_named(names: Sequence[str], options: ReadOptions, filters: Sequence[RecordFilter], where: str) -> None:
    """Raise UserError for all columns that an option names and that do not exist."""
    named: dict[str, str | None] = {}
    for role in _USUAL:
        name = _named(role, options)
        if name is not None and not (role == "time" and name == NO_COLUMN):
            named.setdefault(name, f"--{role}-column")
    for name in options.keep_columns:
        named.setdefault(name, "--keep-columns")
    for text in options.actions:
        name, rule = parse_action(text)
        for column in (name,) if rule is None else rule.columns:
            named.setdefault(column, "--actions")
    for feature in _event_features(options):
        named.setdefault(feature.name, "--event-features")
    own = {name for text in options.where for name in parse_condition(text).columns}
    for name in (name for rule in filters for name in rule.columns):
        named.setdefault(name, "--where" if name in own else None)
    _refuse_absent(named, names, where)


def _refuse_absent(named: Mapping[str, str | None], names: Sequence[str], where: str) -> None:
    """Raise UserError where columns, given with the option that names them, are missing from `names`."""
    absent = {name: option for name, option in named.items() if name not in names}
    if not absent:
        return
    listed = _enumerated([f"{name!r}" + (f" ({option})" if option else "") for name, option in absent.items()], "or")
    meant = [hint for name in absent if (hint := did_you_mean(name, names))]
    raise UserError(f"{where}: there is no column {listed} among {_listed(names)}.{''.join(meant)}")


def _candidates(role: str, named: str | None, names: Sequence[str]) -> list[str]:
    """Return the column that was named, or those of the first tier of usual names that has one."""
    if named is not None:
        return [named]
    for tier in _USUAL[role]:
        usual = set(tier.split())
        found = [name for name in dict.fromkeys(names) if _plain(name) in usual]
        if found:
            with_id = {_plain(name) for name in found}
            return [name for name in found if f"{_plain(name)}id" not in with_id]  # a name beside an id describes it
    return []


def _refuse_unclear(found: Mapping[str, Sequence[str]], names: Sequence[str], where: str) -> None:
    """Raise UserError where a role has no column or several; one message for all roles."""
    missing = [role for role, columns in found.items() if not columns]
    problems = [
        f"{' and '.join(excerpt(name) for name in columns)} both look like the {role}; say which with --{role}-column"
        for role, columns in found.items()
        if len(columns) > 1
    ]
    if missing:
        roles = _enumerated([f"the {role}" for role in missing], "or")
        options = _enumerated([f"--{role}-column" for role in missing], "and")
        remedy = ", or --time-column=none if the records are in time order" if "time" in missing else ""
        problems.append(
            f"no column looks like {roles} among {_listed(names)}; name {'it' if len(missing) == 1 else 'them'} "
            f"with {options}{remedy}"
        )
    if problems:
        raise UserError(f"{where}: {'. Also, '.join(problems)}.{_hints(missing, found, names)}")


def _hints(missing: Sequence[str], found: Mapping[str, Sequence[str]], names: Sequence[str]) -> str:
    """Suggest columns for the roles that have none, unless the names are values."""
    if any(re.fullmatch(r"[-+0-9.eE:T ]+", name) for name in names):
        example = "--column-names=user_id,item_id,timestamp"
        return f" Is the first line no header? Then name the columns, for instance {example}." if missing else ""
    if len(names) == 1 and missing:
        return " If that is several columns in one, say what separates them with --delimiter."
    taken = {name for columns in found.values() for name in columns}
    free = [name for name in names if name not in taken and len(_plain(name)) >= _SHORTEST_LIKE]
    meant = {role: name for role in missing if (name := _nearest_to_usual(role, free)) is not None}
    if len(set(meant.values())) < len(meant):
        return ""
    if not meant:
        return ""
    return f" Did you mean {' '.join(f'--{role}-column={name[:80]}' for role, name in meant.items())}?"


def _nearest_to_usual(role: str, names: Sequence[str]) -> str | None:
    """Return the column whose name is most like a usual one, None if none is."""
    usual = [name for tier in _USUAL[role] for name in tier.split()]
    likeness = {
        name: max(difflib.SequenceMatcher(None, _plain(name), other).ratio() for other in usual) for name in names
    }
    best = max(likeness, key=lambda name: likeness[name], default=None)
    return best if best is not None and likeness[best] >= _ALIKE else None


def _enumerated(parts: Sequence[str], conjunction: str) -> str:
    return f" {conjunction} ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(excerpt(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def usual_columns(role: str, names: Sequence[str]) -> list[str]:
    """Return the columns that look like the role "user", "item" or "time" by their names, the likeliest ones alone."""
    return _candidates(role, None, names)


def guess_item_column(names: Sequence[str]) -> str | None:
    """Return the first column that is usually called so for the item, None if there is none."""
    for tier in _USUAL["item"]:
        usual = set(tier.split())
        found = next((name for name in names if plain_name(name) in usual), None)
        if found is not None:
            return found
    return None


def plain_name(name: str) -> str:
    """Return the small letters and digits of a name: Movie_ID is movieid."""
    return _plain(name)
