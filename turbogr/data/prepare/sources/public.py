"""The public data sets in the formats in which they are distributed, with their published filtering and split."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turbogr.data.prepare.columns import choose_columns, looks_like_header, refuse_doubled
from turbogr.data.prepare.source import (
    NO_COLUMN,
    OF_FILES,
    OF_TYPED_FILES,
    ReadOptions,
    RecordFilter,
    Source,
    option,
    register_built_in,
)
from turbogr.data.prepare.sources.delimited import (
    DelimitedReader,
    Layout,
    open_csv,
    read_lines,
    read_names,
    sniff_delimiter,
)
from turbogr.data.prepare.sources.input_files import find_files, plain_name
from turbogr.data.prepare.sources.jsonl import SUFFIXES, JsonLinesReader, open_jsonl
from turbogr.data.split import LEAVE_ONE_OUT, LEAVE_TWO_OUT
from turbogr.errors import UserError

_RATING_NAMES = ("user", "item", "rating", "timestamp")
_LENGTH_OF_ASIN = 10


def open_movielens(paths: Sequence[Path], options: ReadOptions) -> DelimitedReader:
    """Open ratings.dat (user::item::rating::time), ratings.csv (with a header) or u.data (tabs), every rating."""
    files = _in_folders(paths, ("ratings.dat", "ratings.csv", "u.data"))
    first = next(read_lines(files[0], Layout(",", quoted=False))).data.split(b"\n", 1)[0]
    delimiter = next((mark for mark in ("::", "\t") if mark.encode() in first), None)
    if delimiter is None:
        return open_csv(files, options)
    layout = Layout(delimiter, _RATING_NAMES, quoted=False)
    return DelimitedReader(files, layout, choose_columns(_RATING_NAMES, options, str(files[0])), options)


def _in_folders(paths: Sequence[Path], names: tuple[str, ...]) -> list[Path]:
    """Replace every folder by the one file in it that has one of the names, compressed or not."""
    files = []
    for path in paths:
        if not path.is_dir():
            files += find_files([path], (), "ratings")
            continue
        found = sorted(file for file in path.iterdir() if plain_name(file) in names)
        if len(found) != 1:
            what = " and ".join(file.name for file in found) if found else f"none of {', '.join(names)}"
            raise UserError(f"{path} holds {what}; name the file to read")
        files += found
    if not files:
        raise UserError(f"name the file or folder with {', '.join(names)}")
    return files


def open_amazon(paths: Sequence[Path], options: ReadOptions) -> DelimitedReader | JsonLinesReader:
    """Open ratings (user,item,rating,timestamp, with or without a header) or JSON lines of reviews."""
    files = find_files(paths, (".csv", *SUFFIXES), "Amazon ratings or reviews")
    if Path(plain_name(files[0])).suffix in SUFFIXES:
        return open_jsonl(files, options, partial(_amazon_fields, options))
    first = next(read_lines(files[0], Layout(","))).data.split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    fields = first.split(",")
    named = {name for name in (options.user_column, options.item_column, options.time_column) if name}
    if looks_like_header(fields) or named & {*fields}:
        return open_csv(files, _amazon_fields(options, fields))
    layout = Layout(",", _RATING_NAMES)
    columns = choose_columns(_RATING_NAMES, options, str(files[0]))
    user, item = (fields[_RATING_NAMES.index(name)] for name in (columns.user, columns.item))
    if len(user) == _LENGTH_OF_ASIN and len(item) > _LENGTH_OF_ASIN:
        raise UserError(
            f"{files[0]}, line 1: {user!r} looks like an item and {item!r} like a user; "
            "if the file is in the order item,user, say --user-column=item --item-column=user"
        )
    return DelimitedReader(files, layout, columns, options)


def _amazon_fields(options: ReadOptions, names: Sequence[str]) -> ReadOptions:
    """Name the columns as the releases of 2014, 2018 and 2023 do; a product's variants share its parent_asin."""
    usual = {
        "user_column": ("reviewerID", "user_id"),
        "item_column": ("parent_asin", "asin", "item_id"),
        "time_column": ("unixReviewTime", "timestamp"),
    }
    found: dict[str, Any] = {
        option: next((name for name in candidates if name in names), None)
        for option, candidates in usual.items()
        if getattr(options, option) is None
    }
    return dataclasses.replace(options, **found)


def open_sasrec(paths: Sequence[Path], options: ReadOptions) -> DelimitedReader:
    """Open `user item` lines in time order."""
    files = find_files(paths, (".txt",), "SASRec files")
    names = ("user", "item")
    first = next(read_lines(files[0], Layout(" ", names))).data.split(b"\n", 1)[0]
    layout = Layout("\t" if b"\t" in first else " ", names, quoted=False)
    options = dataclasses.replace(options, time_column=NO_COLUMN)
    return DelimitedReader(files, layout, choose_columns(names, options, str(files[0])), options)


def open_recbole(paths: Sequence[Path], options: ReadOptions) -> DelimitedReader:
    """Open RecBole's atomic .inter files, whose header gives a type with every name (user_id:token)."""
    files = find_files(paths, (".inter",), "RecBole files")
    layout = Layout(sniff_delimiter(files[0], options, "\t"), quoted=False)
    typed = read_names(files[0], layout)
    names = [_without_type(name) for name in typed]
    refuse_doubled(names, f"{files[0]}, line 1")
    columns = choose_columns(names, options, str(files[0]))
    for name in columns.names:
        kind = typed[names.index(name)].partition(":")[2]
        if kind.endswith("_seq"):
            raise UserError(f"{files[0]}: column {name!r} is a sequence ({kind}); it must hold one value per record")
    return DelimitedReader(files, layout, columns, options, rename=_without_type)


def _without_type(name: str) -> str:
    return name.partition(":")[0]


_POSITIVE = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view")
_FEEDBACK = (
    "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "play_time_ms",
    "profile_stay_time", "comment_stay_time", "is_profile_enter",
)  # fmt: skip
_KUAIRAND_LOGS = {"standard": ("log_standard_",), "random": ("log_random_",), "both": ("log_standard_", "log_random_")}


@dataclass(frozen=True)
class KuaiRandOptions:
    """The options that only this source has."""

    logs: Literal["standard", "random", "both"] | None = option(None, "which logs of a folder (standard)")
    feedback: Literal["positive", "all"] = option(
        "positive", "records without hate and with a positive signal, or all (positive)"
    )


def _no_hate(columns: dict[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
    return ~(columns["is_hate"] > 0)


def _some_signal(columns: dict[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
    signal = np.zeros(len(columns["is_hate"]), bool)
    for name in _POSITIVE:
        signal |= columns[name] > 0
    return signal


_KUAIRAND_FILTERS = (
    RecordFilter("hated by the user", ("is_hate",), _no_hate),
    RecordFilter("no positive signal", ("is_hate", *_POSITIVE), _some_signal),
)


def open_kuairand(paths: Sequence[Path], options: ReadOptions) -> DelimitedReader:
    """Open the log parts of KuaiRand-Pure, -1K or -27K, by default without "hate" and with a positive signal."""
    logs = options.own.logs
    if logs is not None and paths and not any(path.is_dir() for path in paths):
        raise UserError(f"--logs chooses among the logs of a folder, but {paths[0]} is none; leave --logs out")
    logs = logs or "standard"
    files = []
    for path in paths:
        inside = find_files([path], (".csv",), "KuaiRand logs")
        files += [file for file in inside if not path.is_dir() or file.name.startswith(_KUAIRAND_LOGS[logs])]
    if not files:
        where = paths[0] if paths else "the folder"
        raise UserError(f"{where} holds no {logs} log ({', '.join(p + '*.csv' for p in _KUAIRAND_LOGS[logs])})")
    named = dataclasses.replace(
        options,
        user_column=options.user_column or "user_id",
        item_column=options.item_column or "video_id",
        time_column=options.time_column or "time_ms",
    )
    layout = Layout(",")
    filters = _KUAIRAND_FILTERS if options.own.feedback == "positive" else ()
    columns = choose_columns(read_names(files[0], layout), named, str(files[0]), filters=filters)
    return DelimitedReader(files, layout, columns, options)


register_built_in(
    Source(
        "movielens",
        "ratings.dat, ratings.csv or u.data",
        open_movielens,
        OF_FILES,
        split=LEAVE_ONE_OUT,
        actions=("rating",),
    )
)
register_built_in(
    Source(
        "amazon",
        "ratings without a header, or JSON reviews; 5-core",
        open_amazon,
        OF_TYPED_FILES,
        split=LEAVE_ONE_OUT,
        min_user_events=5,
        min_item_events=5,
    )
)
register_built_in(Source("sasrec", "'user item' per line in time order", open_sasrec, OF_FILES, split=LEAVE_TWO_OUT))
register_built_in(
    Source("recbole", "RecBole's .inter files", open_recbole, (*OF_TYPED_FILES, "delimiter"), split=LEAVE_TWO_OUT)
)
register_built_in(
    Source(
        "kuairand",
        "KuaiRand-Pure, -1K and -27K; positive feedback, 5-core",
        open_kuairand,
        OF_TYPED_FILES,
        split=LEAVE_ONE_OUT,
        min_user_events=5,
        min_item_events=5,
        config=KuaiRandOptions,
        actions=_FEEDBACK,
        event_features=("tab:category", "duration_ms:number"),
    )
)
