"""`turbogr prepare SOURCE [PATH...] --out DIR`: an interaction log becomes a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turbogr.data.prepare import DUPLICATES, TIES, prepare
from turbogr.data.sources import SOURCES, check_options, find_source
from turbogr.data.sources.block import QUOTES
from turbogr.data.sources.synthetic import SYNTHETIC, check_log_path, synthetic_settings, write_log
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.times import UNITS


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    listed = "\n".join(f"  {source.name:<10} {source.summary}" for source in SOURCES.values())
    parser = subparsers.add_parser(
        "prepare",
        help="turn an interaction log into a prepared store",
        description=f"Turn an interaction log into a prepared store.\n\nsources:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="kind of input: " + ", ".join(SOURCES))
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files, folders or globs")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write the store")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that exists")
    columns = parser.add_argument_group("columns (guessed from the usual names unless given)")
    columns.add_argument("--user-column", metavar="NAME")
    columns.add_argument("--item-column", metavar="NAME")
    columns.add_argument("--time-column", metavar="NAME", help="'none' if the rows are in time order and have no times")
    columns.add_argument(
        "--keep-columns", metavar="A,B", type=_names, default=(), help="number columns to keep beside the items"
    )
    columns.add_argument("--time-unit", choices=UNITS, default="auto", help="unit of times that are numbers")
    columns.add_argument(
        "--time-format", metavar="FORMAT", help="strptime format of times that are text, e.g. %%d/%%m/%%Y"
    )
    columns.add_argument("--delimiter", metavar="CHAR", help="of delimited text; guessed from the first line")
    columns.add_argument("--column-names", metavar="A,B", type=_names, default=(), help="of text without a header")
    columns.add_argument("--quote", choices=QUOTES, help="'none' if quotes in delimited text are part of it (double)")
    columns.add_argument("--text-ids", action="store_true", help="treat ids as text even if they look like integers")
    rows = parser.add_argument_group("rows (defaults are the source's published ones)")
    rows.add_argument("--drop-bad-rows", action="store_true", help="drop and count rows that cannot be read")
    rows.add_argument("--min-user-events", type=int, metavar="N", help="drop users with fewer events (until stable)")
    rows.add_argument("--min-item-events", type=int, metavar="N", help="drop items with fewer events (until stable)")
    rows.add_argument("--duplicates", choices=DUPLICATES, help="drop rows with the same user, item (and time)")
    rows.add_argument("--ties", choices=TIES, help="order of a user's events at the same time: the input's, or random")
    rows.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="keep rows with, e.g., 'rating >= 4' (repeatable)",
    )
    rows.add_argument(
        "--extend", metavar="STORE", help="keep the rows of this store's users and items, append new ones"
    )
    rows.add_argument("--split", metavar="RULE", help="leave-one-out, leave-two-out, time:DATE or time:DATE,DATE")
    kuairand = parser.add_argument_group("kuairand")
    kuairand.add_argument("--logs", choices=("standard", "random", "both"), help="which logs of a folder (standard)")
    kuairand.add_argument(
        "--feedback",
        choices=("positive", "all"),
        help="rows without hate and with a positive signal, or all (positive)",
    )
    synthetic = parser.add_argument_group("synthetic")
    for name, (kind, summary) in _SYNTHETIC.items():
        synthetic.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=summary)
    synthetic.add_argument("--log", metavar="PATH", help="also write the raw log: a .parquet or .csv file, or a folder")
    parser.add_argument("--threads", type=int, metavar="N", help="threads to use (default: all cores)")
    parser.set_defaults(run=run)


_SYNTHETIC: dict[str, tuple[type, str]] = {
    "preset": (str, "demo or kuairand-27k; the other options change single values of it"),
    "num_users": (int, "users of the log"),
    "num_items": (int, "items of the catalogue"),
    "mean_length": (float, "mean events per user"),
    "median_length": (float, "median events per user"),
    "max_length": (int, "most events of a user"),
    "min_length": (int, "fewest events of a user"),
    "num_topics": (int, "topics of the catalogue"),
    "interests": (int, "interests of a user at a time"),
    "session_length": (float, "mean events per session"),
    "drift": (int, "sessions after which an interest is exchanged"),
    "noise": (float, "share of events that are something popular"),
    "side": (float, "share of events that continue the side interest of a session"),
    "abandon": (float, "share of events that leave a series early"),
    "zipf": (float, "exponent of the popularity"),
    "seed": (int, "seed of the generator"),
}
_OF_ONE_SOURCE = (*_SYNTHETIC, "logs", "feedback")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(args: argparse.Namespace) -> int:
    """Prepare, and end with the account of the rows."""
    extra = {name: getattr(args, name) for name in _OF_ONE_SOURCE if getattr(args, name) is not None}
    if args.log is not None:
        if args.source != SYNTHETIC.name:
            check_options(find_source(args.source), ["log"])
        check_log_path(Path(args.log))
    store = prepare(
        args.source,
        args.paths,
        args.out,
        user_column=args.user_column,
        item_column=args.item_column,
        time_column=args.time_column,
        keep_columns=args.keep_columns,
        time_unit=args.time_unit,
        time_format=args.time_format,
        delimiter=args.delimiter,
        column_names=args.column_names,
        quote=args.quote,
        text_ids=args.text_ids,
        drop_bad_rows=args.drop_bad_rows,
        split=args.split,
        min_user_events=args.min_user_events,
        min_item_events=args.min_item_events,
        duplicates=args.duplicates,
        ties=args.ties,
        where=args.where,
        extend=args.extend,
        overwrite=args.overwrite,
        threads=args.threads,
        progress=True,
        **extra,
    )
    print(_reading(store))
    print(account_table(store))
    path = str(store.path).encode("utf-8", "backslashreplace").decode()  # a name of a file need not be Unicode
    print(f"\n{store.num_users:,} users, {store.num_items:,} items, {store.num_events:,} events -> {path}")
    print(Split.of(store).describe())
    if args.log is not None:
        events = write_log(synthetic_settings(extra), Path(args.log), progress=True)
        print(f"{events:,} events -> {args.log}")
    return 0


def _reading(store: Store) -> str:
    """Say which columns were taken for what."""
    settings = store.manifest.settings
    columns, time = settings["columns"], settings["time"]
    text = f"read user from {columns['user']!r}, item from {columns['item']!r}, "
    if columns["time"] is None:
        return text + "time from the order of the rows"
    unit = f" in {time['unit']}" if time["written"] in ("integer", "decimal") else ""
    return f"{text}time from {columns['time']!r} ({time['written']}{unit})"


def account_table(store: Store) -> str:
    """Return the account of the rows: in = kept + dropped, by reason."""
    account = store.manifest.account
    lines = [("rows in", account["rows_in"])]
    lines += [(f"dropped: {reason}", -count) for reason, count in account["dropped"].items()]
    lines.append(("rows kept", account["rows_kept"]))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {count:>15,}" for label, count in lines)
