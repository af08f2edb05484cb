"""`turbogr item-info STORE FILE`: add titles and other columns about the items to a prepared store."""

from __future__ import annotations

import argparse
from typing import Any

from turbogr.data.item_info import describe_item_info
from turbogr.data.prepare.item_table import add_item_info


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "item-info",
        help="add titles and other columns about the items to a prepared store",
        description="Add titles and other columns about the items to a prepared store, from a file with a record per "
        "item. report, recommend and inspect show the titles. The store's content does not change, so runs stay valid; "
        "what was added before is replaced.",
    )
    parser.add_argument("store", metavar="STORE", help="a folder written by turbogr prepare")
    parser.add_argument("file", metavar="FILE", help="a .csv, .tsv, .dat or .parquet file")
    parser.add_argument("--id-column", metavar="NAME", help="the column with the items' ids (guessed)")
    parser.add_argument("--title-column", metavar="NAME", help="the column with the titles (guessed)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Add the columns, and say what became of the records."""
    info = add_item_info(args.store, args.file, id_column=args.id_column, title_column=args.title_column)
    print("\n".join(describe_item_info(info)))
    return 0
