"""`turbogr prepare SOURCE [PATH...] --out DIR`: an interaction log becomes a store."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from turbogr.commands._plugins_option import add_plugins_option, load_given_plugins
from turbogr.data.feature_summary import describe_features
from turbogr.data.item_info import ItemInfo, describe_item_info
from turbogr.data.prepare.filters import DUPLICATES
from turbogr.data.prepare.preparation import TIES, prepare
from turbogr.data.prepare.source import DECIMALS, QUOTES, Source
from turbogr.data.prepare.source_lookup import (
    OF_EVERY_SOURCE,
    built_in_sources,
    check_options,
    find_source,
    own_options,
    read_options,
    source_names,
)
from turbogr.data.prepare.sources import synthetic
from turbogr.data.prepare.time_column import UNITS
from turbogr.data.repeats import count_repeats
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    sources = built_in_sources()
    parser = subparsers.add_parser(
        "prepare",
        help="turn an interaction log into a prepared store",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help; after a source, its options")
    parser.add_argument("source", help="kind of input: one of these, or the name of a plug-in's source")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files, folders or globs")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write the store")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that exists")
    add_plugins_option(parser)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="an option that only this source has, such as that of a plug-in; may be repeated",
    )
    columns = parser.add_argument_group("columns (guessed from the usual names unless given)")
    columns.add_argument("--user-column", metavar="NAME", help="who: a user, customer, session, ...")
    columns.add_argument("--item-column", metavar="NAME", help="what: an item, product, video, ...")
    columns.add_argument(
        "--time-column", metavar="NAME", help="'none' if the records are in time order and have no times"
    )
    columns.add_argument(
        "--keep-columns", metavar="A,B", type=_names, default=(), help="number columns to keep beside the items"
    )
    columns.add_argument(
        "--actions",
        metavar="A,B",
        type=_names,
        default=(),
        help="number columns that say what users did, for ranking: is_click,like=rating>=4; all: the usual ones",
    )
    columns.add_argument(
        "--event-features",
        metavar="A,B",
        type=_names,
        default=(),
        help="columns that are known when an item is shown: tab or tab:category, duration:number; all: the usual ones",
    )
    columns.add_argument(
        "--time-unit", metavar="UNIT", default="auto", help=f"unit of times that are numbers: {', '.join(UNITS)}"
    )
    columns.add_argument(
        "--time-format", metavar="FORMAT", help="strptime format of times that are text, e.g. %%d/%%m/%%Y"
    )
    columns.add_argument("--delimiter", metavar="CHAR", help="of delimited text; guessed from the first line")
    columns.add_argument("--column-names", metavar="A,B", type=_names, default=(), help="of text without a header")
    columns.add_argument("--quote", choices=QUOTES, help="'none' if quotes in delimited text are part of it (double)")
    columns.add_argument("--encoding", metavar="NAME", help="of delimited text, e.g. latin-1 or cp1252 (utf-8)")
    columns.add_argument(
        "--decimal", metavar="MARK", help=f"decimal mark of numbers in text: {' or '.join(DECIMALS)} (point)"
    )
    columns.add_argument("--text-ids", action="store_true", help="treat ids as text even if they look like integers")
    records = parser.add_argument_group("records (defaults are the source's published ones)")
    records.add_argument("--drop-bad-rows", action="store_true", help="drop and count records that cannot be read")
    records.add_argument("--min-user-events", type=int, metavar="N", help="drop users with fewer events (until stable)")
    records.add_argument("--min-item-events", type=int, metavar="N", help="drop items with fewer events (until stable)")
    records.add_argument("--duplicates", choices=DUPLICATES, help="drop records with the same user, item (and time)")
    records.add_argument(
        "--ties", choices=TIES, help="order of a user's events at the same time: the input's, or random"
    )
    records.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="keep records with, e.g., 'rating >= 4' (repeatable)",
    )
    records.add_argument(
        "--extend", metavar="STORE", help="keep the rows of this store's users and items, append new ones"
    )
    records.add_argument("--split", metavar="RULE", help="leave-one-out, leave-two-out, time:DATE or time:DATE,DATE")
    about = parser.add_argument_group("items (what they are; turbogr item-info adds this to a store that exists)")
    about.add_argument("--item-info", metavar="FILE", help="titles and other columns: .csv, .tsv, .dat or .parquet")
    about.add_argument("--item-info-id", metavar="NAME", help="its column with the items' ids (guessed)")
    about.add_argument("--item-info-title", metavar="NAME", help="its column with the titles (guessed)")
    for owner in ("item", "user"):
        features = parser.add_argument_group(f"features of {owner}s")
        features.add_argument(
            f"--{owner}-features",
            metavar="FILE",
            help=f"a record per {owner}: .csv, .tsv, .dat or .parquet; joined by raw id",
        )
        features.add_argument(
            f"--{owner}-features-id", metavar="NAME", help=f"its column with the {owner}s' ids (guessed)"
        )
        features.add_argument(
            f"--{owner}-feature-columns",
            metavar="A,B",
            type=_names,
            default=(),
            help="its columns to take (all): tag, or with a kind tag:categories, author:category, age:number",
        )
        if owner == "item":
            features.add_argument("--item-vectors", metavar="FILE", help="a content vector per item, a column of lists")
            features.add_argument("--item-vectors-id", metavar="NAME", help="its column with the items' ids (guessed)")
    for source in sources:
        _add_own_options(parser, source)
    parser.add_argument(
        "--log", metavar="PATH", help="of synthetic: also write the raw log to a .parquet or .csv file, or a folder"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads to use (default: all cores)")
    parser.set_defaults(run=run)


class _Help(argparse.Action):
    """`--help`: the sources, or after the name of one its options alone."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if namespace.source is None:
            _show_sources(parser)
        else:
            load_given_plugins(namespace)
            _show_source(parser, find_source(namespace.source))
        parser.print_help()
        parser.exit()


def _show_sources(parser: argparse.ArgumentParser) -> None:
    """Make the help that of the command as a whole: what there is to read, and where the options are."""
    names = sorted(source_names(), key=lambda name: name == synthetic.NAME)
    width = max(map(len, names))
    listed = "\n".join(f"  {name:<{width}}  {find_source(name).summary}" for name in names)
    parser.usage = "turbogr prepare SOURCE [PATH ...] --out DIR [options of the source]"
    parser.description = (
        "Turn an interaction log (who, what, when) into a prepared store. Columns are found by their usual names;\n"
        f"every record is kept, or dropped for a reason that is printed.\n\nsources:\n{listed}\n\n"
        "turbogr prepare SOURCE --help shows the options of a source, for instance turbogr prepare csv --help\n\n"
        "examples:\n"
        "  turbogr prepare csv clicks.csv --out data/mine\n"
        "  turbogr prepare parquet logs/ --user-column customer --item-column sku --time-column sold --out data/mine"
    )
    _hide(parser, [])


def _show_source(parser: argparse.ArgumentParser, source: Source) -> None:
    """Make the help that of one source: only options that it takes."""
    paths = "" if source.name == synthetic.NAME else " PATH [PATH ...]"
    parser.usage = f"turbogr prepare {source.name}{paths} --out DIR [options]"
    minima = f"{source.min_user_events} events of a user, {source.min_item_events} of an item"
    kept = "all records" if max(source.min_user_events, source.min_item_events) == 1 else f"at least {minima}"
    lines = [f"{source.name}: {source.summary.rstrip('.')}.", f"Kept by default: {kept}. Split: {source.split}."]
    if source.plugin is not None and source.own_names:
        lines.append(f"Options of its own, as --option KEY=VALUE: {', '.join(source.own_names)}.")
    parser.description = "\n".join(lines)
    own = ["log"] if source.name == synthetic.NAME else ["paths"]
    own += source.own_names if source.plugin is None else ["plugins", "settings"]
    every = [name for name in OF_EVERY_SOURCE if name != "plugins"]
    _hide(parser, [*source.takes, *every, *own, "out", *_OF_TABLES])


_OF_TABLES = (
    "item_info", "item_info_id", "item_info_title", "item_features", "item_features_id", "item_feature_columns",
    "user_features", "user_features_id", "user_feature_columns", "item_vectors", "item_vectors_id",
)  # fmt: skip


def _hide(parser: argparse.ArgumentParser, shown: Sequence[str]) -> None:
    """Leave all options out of the help but these; a group without any is left out too."""
    for action in parser._actions:
        if action.dest not in shown:
            action.help = argparse.SUPPRESS


def _add_own_options(parser: argparse.ArgumentParser, source: Source) -> None:
    """Add an option for each one that only this source has."""
    if source.config is None:
        return
    group = parser.add_argument_group(source.name)
    hints = get_type_hints(source.config)
    for field in dataclasses.fields(source.config):
        hint = hints[field.name]
        if type(None) in get_args(hint):
            hint = get_args(hint)[0]
        flag, summary = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        if hint is bool:
            group.add_argument(flag, action="store_const", const=True, help=summary)
        elif get_origin(hint) is Literal:
            group.add_argument(flag, choices=get_args(hint), help=summary)
        else:
            group.add_argument(flag, type=hint, metavar=hint.__name__.upper(), help=summary)


_SOURCES_OF = {
    ".csv": "csv",
    ".txt": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".inter": "recbole",
    ".dat": "movielens",
}


def _refuse_path_for_source(given: str) -> None:
    """Raise UserError if the kind of input was left out, so that a path stands in its place."""
    path = Path(given)
    if given in source_names() or not (path.exists() or path.suffix.lower() in _SOURCES_OF):
        return
    kind = _SOURCES_OF.get(path.suffix.lower(), "SOURCE")
    raise UserError(
        f"{given} is a path, and the kind of input comes first: turbogr prepare {kind} {given} --out DIR. "
        "See turbogr prepare --help for the kinds"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(args: argparse.Namespace) -> int:
    """Prepare, and end with the account of the records."""
    load_given_plugins(args)
    _refuse_path_for_source(args.source)
    source = find_source(args.source)
    own = {name: getattr(args, name) for other in built_in_sources() for name in other.own_names}
    own |= read_options(source, args.settings)
    if args.log is not None:
        if args.source != synthetic.NAME:
            check_options(source, ["log"])
        synthetic.check_log_path(Path(args.log))
    store = prepare(
        args.source,
        args.paths,
        args.out,
        user_column=args.user_column,
        item_column=args.item_column,
        time_column=args.time_column,
        keep_columns=args.keep_columns,
        actions=args.actions,
        event_features=args.event_features,
        time_unit=args.time_unit,
        time_format=args.time_format,
        delimiter=args.delimiter,
        column_names=args.column_names,
        quote=args.quote,
        encoding=args.encoding,
        decimal=args.decimal,
        text_ids=args.text_ids,
        drop_bad_rows=args.drop_bad_rows,
        split=args.split,
        min_user_events=args.min_user_events,
        min_item_events=args.min_item_events,
        duplicates=args.duplicates,
        ties=args.ties,
        where=args.where,
        extend=args.extend,
        **{name: getattr(args, name) for name in _OF_TABLES},
        overwrite=args.overwrite,
        threads=args.threads,
        progress=True,
        **own,
    )
    print(_reading(store))
    print(account_table(store))
    path = str(store.path).encode("utf-8", "backslashreplace").decode()  # a name of a file need not be Unicode
    print(f"\n{store.num_users:,} users, {store.num_items:,} items, {store.num_events:,} events -> {path}")
    split = Split.of(store)
    print(split.describe())
    repeats = count_repeats(store, split)
    if repeats is not None:
        print(repeats.advise())
    info = ItemInfo.of(store)
    for line in [*describe_features(store), *([] if info is None else describe_item_info(info))]:
        print(line)
    if args.log is not None:
        chosen = own_options(source, own)
        events = synthetic.write_log(
            chosen.settings(), Path(args.log), with_features=bool(chosen.with_features), progress=True
        )
        print(f"{events:,} events -> {args.log}")
    return 0


def _reading(store: Store) -> str:
    """Say which columns were read as what."""
    settings = store.manifest.settings
    columns, time = settings["columns"], settings["time"]
    text = f"read user from {columns['user']!r}, item from {columns['item']!r}, "
    if columns["time"] is None:
        return text + "time from the order of the records"
    unit = f" in {time['unit']}" if time["written"] in ("integer", "decimal") else ""
    return f"{text}time from {columns['time']!r} ({time['written']}{unit})"


def account_table(store: Store) -> str:
    """Return the account of the records: in = kept + dropped, by reason."""
    account = store.manifest.account
    lines = [("records in", account["rows_in"])]
    lines += [(f"dropped: {reason}", -count) for reason, count in account["dropped"].items()]
    lines.append(("records kept", account["rows_kept"]))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {count:>15,}" for label, count in lines)
