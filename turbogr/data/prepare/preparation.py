"""`prepare`: an interaction log becomes a store. Options are checked here; `store_builder` has the stages."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turbogr.data.dataframes import is_table
from turbogr.data.item_info import carry_item_info
from turbogr.data.prepare import data_warnings
from turbogr.data.prepare.columns import parse_action
from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.feature_kinds import parse_feature
from turbogr.data.prepare.feature_table import open_feature_table
from turbogr.data.prepare.feature_warnings import feature_warnings
from turbogr.data.prepare.filters import DUPLICATES, Filters
from turbogr.data.prepare.item_table import ItemTable, read_item_table
from turbogr.data.prepare.ordered_map import default_threads
from turbogr.data.prepare.progress_bar import Progress
from turbogr.data.prepare.source import ReadOptions, Source
from turbogr.data.prepare.source_lookup import check_options, find_source, own_options
from turbogr.data.prepare.sources.memory_table import table_source
from turbogr.data.prepare.store_builder import StoreBuilder
from turbogr.data.prepare.time_column import read_unit
from turbogr.data.prepare.vector_table import open_vector_table
from turbogr.data.split import Split, parse_rule
from turbogr.data.store import ITEM_INFO, Store
from turbogr.data.store_writer import StoreWriter
from turbogr.errors import Note, UserError, warn_caller
from turbogr.plugins import load_plugins

TIES = ("file", "random")
_LONGEST_NAME = 200  # in bytes; common file systems end at 255


def prepare(
    source: Any,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    keep_columns: str | Sequence[str] = (),
    actions: str | Sequence[str] = (),
    event_features: str | Sequence[str] = (),
    time_unit: str = "auto",
    time_format: str | None = None,
    delimiter: str | None = None,
    column_names: str | Sequence[str] = (),
    quote: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    text_ids: bool = False,
    drop_bad_rows: bool = False,
    split: str | None = None,
    min_user_events: int | None = None,
    min_item_events: int | None = None,
    duplicates: str | None = None,
    ties: str | None = None,
    where: str | Sequence[str] = (),
    extend: str | os.PathLike[str] | None = None,
    item_info: Any = None,
    item_info_id: str | None = None,
    item_info_title: str | None = None,
    item_features: Any = None,
    item_features_id: str | None = None,
    item_feature_columns: str | Sequence[str] = (),
    user_features: Any = None,
    user_features_id: str | None = None,
    user_feature_columns: str | Sequence[str] = (),
    item_vectors: Any = None,
    item_vectors_id: str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = False,
    plugins: Sequence[str | os.PathLike[str]] = (),
    **own: Any,
) -> Store:
    """Turn the log at `paths`, read as `source`, into a store at `out` and return it.

    `source` is the name of a source such as "csv", or a pandas, polars or pyarrow table of events in memory, which has
    no paths: `prepare(table, out)`.

    Options left at None take the source's published defaults; one that means nothing to the source is refused.

    Args:
        keep_columns: number columns to keep.
        actions: number columns that say what users did, which a ranking model predicts and sees of earlier events, or
            conditions on them such as "like=rating>=4". "all" are those that the source is known for.
        event_features: columns that are known when an item is shown, such as the device. Of which kind a feature is
            is seen from its values, or said as in "tab:category" or "duration:number". "all" as for actions.
        encoding, decimal: of delimited text: its encoding if it is not UTF-8 (such as "latin-1"), and the decimal mark
            of numbers, "point" or "comma".
        split: which events are held out, see `turbogr.data.split`.
        min_user_events, min_item_events: users and items with fewer events are dropped until none is left.
        duplicates: which repeated records are dropped: "keep" none, "exact" those of the same user, item and time,
            "item" every later event of a user with the same item.
        time_unit: of times that are numbers: s, ms, us, ns, min, h or d; "auto" sees it from their size.
        ties: the order of a user's events at the same time, that of the "file" or a fixed "random" one; if None, as in
            the extended store, else that of the file.
        where: conditions on records, such as "rating >= 4".
        extend: a store whose users and items keep their rows; new ones are appended.
        item_info: a file or table with a record per item, as in `add_item_info`; `item_info_id` and `item_info_title`
            name its columns. A store that extends another takes over what is known of the items there.
        item_features, user_features: a file or table with a record per item or user, joined by raw id. Their id column
            is found by its name or given as `item_features_id`; `item_feature_columns` are the columns that become
            features (all), also with a kind: "category", "categories" (several, separated by | or commas) or "number".
        item_vectors: a file or table with a vector per item: a column of lists, or a column of numbers per element.
        plugins: modules or files that register sources.
        own: options that only this source has.

    Raises:
        UserError: anything that the user can fix; nothing is left behind then.
    """
    load_plugins([os.fspath(plugin) for plugin in plugins])
    kind, paths, out = _source_and_folders(source, paths, out)
    options = ReadOptions(
        user_column=_name(user_column),
        item_column=_name(item_column),
        time_column=_name(time_column),
        keep_columns=_names(keep_columns),
        actions=_all_of(kind.actions, actions, "--actions", kind),
        event_features=_all_of(kind.event_features, event_features, "--event-features", kind),
        time_unit=read_unit(time_unit),
        time_format=time_format,
        delimiter=delimiter,
        column_names=_names(column_names),
        quote=quote,
        encoding=encoding,
        decimal={",": "comma", ".": "point"}.get(decimal or "", decimal),
        text_ids=text_ids,
        drop_bad_rows=drop_bad_rows,
        where=_names(where),
    )
    check_options(kind, options.changed())
    options = dataclasses.replace(options, own=own_options(kind, own))
    come_with_it = options.own.own_tables() if hasattr(options.own, "own_tables") else None
    if come_with_it is not None:
        item_features = come_with_it.items if item_features is None else item_features
        user_features = come_with_it.users if user_features is None else user_features
        options = dataclasses.replace(
            options,
            actions=options.actions or come_with_it.actions,
            event_features=options.event_features or come_with_it.event_features,
        )
    _check_file_names(options)
    filters = _choose_filters(kind, min_user_events, min_item_events, duplicates)
    rule = parse_rule(kind.split if split is None else split)
    _check_choice("--ties", ties, (None, *TIES))
    threads = default_threads() if threads is None else threads
    _check_count("--threads", threads)
    known = None if extend is None else Store.open(extend)
    if known is not None:
        options = _as_extended(options, known)
    order, _ = (known and known.manifest.ties) or ("file", 0)
    reader = kind.open([Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)], options)
    if reader.columns.time is None:
        _refuse_options_of_times(rule, duplicates, ties, options)
    if known is not None and text_ids:
        _refuse_text_ids(known)
    items = _item_table(item_info, item_info_id, item_info_title, reader.columns.item)
    tables = [
        open_feature_table(owner, table, id_column, _names(chosen), log_column)
        for owner, table, id_column, chosen, log_column in (
            ("item", item_features, item_features_id, item_feature_columns, reader.columns.item),
            ("user", user_features, user_features_id, user_feature_columns, reader.columns.user),
        )
        if _is_given(table, owner, id_column, _names(chosen))
    ]
    if item_vectors is None and item_vectors_id is not None:
        raise UserError(f"--item-vectors-id {item_vectors_id} names a column of a table; give it with --item-vectors")
    vectors = None
    if item_vectors is not None:
        vectors = open_vector_table(item_vectors, item_vectors_id, reader.columns.item)
    had_item_info = (Path(out) / ITEM_INFO).exists()
    with StoreWriter(out, overwrite=overwrite) as writer, contextlib.ExitStack() as cleanup:
        builder = StoreBuilder(
            writer, cleanup, kind, reader, options, filters, rule, ties or order, known, threads, Progress(progress),
            tuple(tables), vectors,
        )  # fmt: skip
        store = builder.build()
    _add_item_info(store, items, known, had_item_info)
    for sentence in [*builder.warnings, *feature_warnings(store)]:
        warn_caller(sentence, DataWarning)
    in_file_order = data_warnings.ties_in_file_order(store)
    if in_file_order is not None:
        warn_caller(in_file_order, Note)
    few = Split.of(store).few_users()
    if few is not None:
        warn_caller(few, Note)
    leak = data_warnings.training_on_the_future(store)
    if leak is not None:  # the source's usual split is expected to leak
        warn_caller(leak, Note if split is None else DataWarning)
    return store


def _source_and_folders(
    source: Any, paths: Any, out: str | os.PathLike[str] | None
) -> tuple[Source, Any, str | os.PathLike[str]]:
    """Return the source, the paths it reads and the folder to write; a table has no paths."""
    if is_table(source):
        if out is not None and paths:
            raise UserError("a table in memory has no paths; give the folder to write to alone")
        out = paths if out is None else out
        source, paths = table_source(source), ()
    elif isinstance(source, str):
        source = find_source(source)
    elif not isinstance(source, Source):
        raise UserError(
            f"expected the name of a source or a pandas, polars or pyarrow table, got {type(source).__name__}"
        )
    if out is None:
        raise UserError("there is no folder to write to; name it with --out")
    return source, () if paths is None else paths, out


def _item_table(items: Any, id_column: str | None, title_column: str | None, log_column: str) -> ItemTable | None:
    """Read the table about items, before the long work starts."""
    if items is not None:
        return read_item_table(items, id_column, title_column, log_column=log_column)
    for option, value in (("--item-info-id", id_column), ("--item-info-title", title_column)):
        if value is not None:
            raise UserError(f"{option} {value} names a column of a table about items; give the table with --item-info")
    return None


def _add_item_info(store: Store, items: ItemTable | None, known: Store | None, had_some: bool) -> None:
    """Add what is known of the items to a store that is complete without it."""
    if items is not None:
        try:
            items.add_to(store)
        except UserError as error:
            raise UserError(f"{error}. The store is complete without it; `turbogr item-info` adds it later") from error
    elif (known is None or carry_item_info(known, store) is None) and had_some:
        warn_caller(
            f"the store that {store.path} replaces had titles or other columns about its items; give them again with "
            "--item-info or `turbogr item-info`",
            Note,
        )


def prepare_table(table: Any, out: str | os.PathLike[str], **options: Any) -> Store:
    """Turn a pandas, polars or pyarrow table in memory into a store; the options are those of `prepare`."""
    return prepare(table_source(table), [], out, **options)


def _all_of(known: tuple[str, ...], asked: str | Sequence[str], option: str, source: Source) -> tuple[str, ...]:
    """Return the columns that are asked for; "all" are those that the source is known for."""
    names = _names(asked)
    if names != ("all",):
        return names
    if not known:
        raise UserError(
            f"{option}=all takes the columns that a source is known for, and {source.name!r} has none; "
            "name columns of the log"
        )
    return known


def _as_extended(options: ReadOptions, known: Store) -> ReadOptions:
    """Take over actions and features of events of the store to be extended, where none are asked for."""
    features = {key: info for key, info in known.manifest.features.items() if key.startswith("event.")}
    if not options.event_features:
        names = tuple(f"{key.removeprefix('event.')}:{info.kind}" for key, info in features.items())
        return dataclasses.replace(
            options, event_features=names, actions=options.actions or tuple(known.manifest.settings.get("actions", ()))
        )
    chosen = []
    for text in options.event_features:
        feature = parse_feature(text, "--event-features", several=False)
        before = features.get(f"event.{feature.name}")
        if before is not None and feature.kind not in (None, before.kind):
            raise UserError(
                f"--event-features {text}: in {known.path}, which is extended, it is of kind {before.kind!r}"
            )
        chosen.append(str(feature) if before is None else f"{feature.name}:{before.kind}")
    return dataclasses.replace(
        options,
        event_features=tuple(chosen),
        actions=options.actions or tuple(known.manifest.settings.get("actions", ())),
    )


def _is_given(table: Any, owner: str, id_column: str | None, columns: Sequence[str]) -> bool:
    """Whether a table of features is given; raises UserError for columns of one that is not."""
    if table is None and (id_column is not None or columns):
        option = f"--{owner}-features-id" if id_column is not None else f"--{owner}-feature-columns"
        raise UserError(f"{option} names columns of a table; give the table with --{owner}-features")
    return table is not None


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(map(str, names))


def _name(column: object) -> str | None:
    """Return the name of a column as text; pandas also takes numbers for names."""
    return None if column is None else str(column)


def _check_count(option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{option} must be an integer of at least 1, got {value!r}")


def _check_choice(option: str, value: object, choices: Sequence[str | None]) -> None:
    if value not in choices:
        raise UserError(f"{option} must be one of {', '.join(filter(None, choices))}, got {value!r}")


def _choose_filters(source: Source, users: int | None, items: int | None, duplicates: str | None) -> Filters:
    """Take the source's defaults where nothing is asked for; raises UserError for impossible values."""
    chosen = Filters(
        source.min_user_events if users is None else users,
        source.min_item_events if items is None else items,
        source.duplicates if duplicates is None else duplicates,
    )
    _check_count("--min-user-events", chosen.min_user_events)
    _check_count("--min-item-events", chosen.min_item_events)
    _check_choice("--duplicates", chosen.duplicates, DUPLICATES)
    return chosen


def _refuse_options_of_times(rule: str, duplicates: str | None, ties: str | None, options: ReadOptions) -> None:
    """Raise UserError for an option that needs times, for a log that has only an order."""
    if rule.startswith("time:"):
        raise UserError(f"split {rule!r} needs times, but the log has only an order; use leave-one-out")
    if duplicates == "exact":
        raise UserError("--duplicates=exact compares times, but the log has only an order; use item or keep")
    if ties is not None:
        raise UserError(f"--ties={ties} is about events at the same time, but the log has only an order; leave it out")
    for name, given in (("unit", options.time_unit != "auto"), ("format", options.time_format is not None)):
        if given:
            raise UserError(f"--time-{name} says how times are written, but the log has none; leave it out")


def _refuse_text_ids(known: Store) -> None:
    for role, ids in (("user", known.user_ids), ("item", known.item_ids)):
        if not ids.is_text:
            raise UserError(
                f"--text-ids does not go with --extend={known.path}, whose {role} ids are integers; leave one out"
            )


def _check_file_names(options: ReadOptions) -> None:
    """Refuse columns whose name cannot be part of the name of a file of the store."""
    columns = dict.fromkeys(options.keep_columns, "--keep-columns")
    columns |= {parse_action(text)[0]: "--actions" for text in options.actions}
    columns |= {
        parse_feature(text, "--event-features", several=False).name: "--event-features"
        for text in options.event_features
    }
    for name, option in columns.items():
        if "/" in name or "\0" in name or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise UserError(
                f"{option}: {name[:80]!r} cannot be the name of a file of the store (it has a slash or a zero "
                f"byte, or more than {_LONGEST_NAME} bytes); rename the column in the log"
            )
