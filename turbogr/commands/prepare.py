"""`turbogr prepare SOURCE [PATH...] --out DIR`: an interaction log becomes a store."""

from __future__ import annotations

import argparse
from typing import Any

from turbogr.data.prepare import DUPLICATES, prepare
from turbogr.data.sources import SOURCES, find_source
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.times import UNITS
from turbogr.errors import UserError


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
    columns.add_argument("--text-ids", action="store_true", help="treat ids as text even if they look like integers")
    rows = parser.add_argument_group("rows (defaults are the source's published ones)")
    rows.add_argument("--drop-bad-rows", action="store_true", help="drop and count rows that cannot be read")
    rows.add_argument("--min-user-events", type=int, metavar="N", help="drop users with fewer events (until stable)")
    rows.add_argument("--min-item-events", type=int, metavar="N", help="drop items with fewer events (until stable)")
    rows.add_argument("--duplicates", choices=DUPLICATES, help="drop rows with the same user, item (and time)")
    rows.add_argument("--split", metavar="RULE", help="leave-one-out, leave-two-out, time:DATE or time:DATE,DATE")
    special = parser.add_argument_group("synthetic data")
    for name, kind in _SYNTHETIC.items():
        special.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=_HELP[name])
    parser.add_argument("--threads", type=int, metavar="N", help="threads to use (default: all cores)")
    parser.set_defaults(run=run)


_SYNTHETIC: dict[str, Any] = {
    "preset": str,
    "num_users": int,
    "num_items": int,
    "mean_length": float,
    "median_length": float,
    "max_length": int,
    "min_length": int,
    "seed": int,
}
_HELP = {
    "preset": "demo or kuairand-27k",
    "num_users": "users of the log",
    "num_items": "items of the catalogue",
    "mean_length": "mean events per user",
    "median_length": "median events per user",
    "max_length": "most events per user",
    "min_length": "fewest events per user",
    "seed": "seed of the generator",
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(args: argparse.Namespace) -> int:
    """Prepare, and end with the account of the rows."""
    known = find_source(args.source).extra
    extra = {name: getattr(args, name) for name in _SYNTHETIC if getattr(args, name) is not None}
    if unknown := [name for name in extra if name not in known]:
        raise UserError(f"--{unknown[0].replace('_', '-')} is not an option of the source {args.source!r}")
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
        text_ids=args.text_ids,
        drop_bad_rows=args.drop_bad_rows,
        split=args.split,
        min_user_events=args.min_user_events,
        min_item_events=args.min_item_events,
        duplicates=args.duplicates,
        overwrite=args.overwrite,
        threads=args.threads,
        progress=True,
        **extra,
    )
    print(account_table(store))
    print(f"\n{store.num_users:,} users, {store.num_items:,} items, {store.num_events:,} events -> {store.path}")
    print(Split.of(store).describe())
    return 0


def account_table(store: Store) -> str:
    """Return the account of the rows: in = kept + dropped, by reason."""
    account = store.manifest.account
    lines = [("rows in", account["rows_in"])]
    lines += [(f"dropped: {reason}", -count) for reason, count in account["dropped"].items()]
    lines.append(("rows kept", account["rows_kept"]))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {count:>15,}" for label, count in lines)
