"""`turbogr recommend`: write the best items of users to a file."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray
from tqdm import tqdm

from turbogr.commands._device_option import add_device_option
from turbogr.commands._plugins_option import add_plugins_option
from turbogr.commands._request_files import FORMATS as TABLES
from turbogr.commands._request_files import delimiter_of, read_items, read_table
from turbogr.data.event_table import NamedColumns, find_column
from turbogr.data.prepare.columns import usual_columns
from turbogr.errors import UserError, did_you_mean, one_line
from turbogr.files import atomic_file, check_writable

if TYPE_CHECKING:
    from turbogr.data.item_info import ItemInfo
    from turbogr.data.store import Store
    from turbogr.recommend import Recommendations

FORMATS = (".parquet", ".csv", ".jsonl")
_USER_COLUMNS = ("user_id", "user", "userid", "uid")
_ROW_GROUP = 1 << 17
_EXAMPLE_ITEMS = 5


def add_parser(subparsers: Any) -> None:
    """Add `recommend` to the command line."""
    parser = subparsers.add_parser(
        "recommend",
        help="write recommendations of a trained run",
        description="Write the best items of every user of the run's store, or of the users in a file. Columns: "
        "user_id, item_id, rank (from 1), score, and title where the store has titles. A ranking run sorts the "
        "candidates that --candidates names, and adds a column with its prediction for each task.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder, as written by `turbogr train`")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="a .parquet, .csv or .jsonl file")
    parser.add_argument("--k", "-k", metavar="N", type=int, default=10, help="items per user (default: %(default)s)")
    parser.add_argument(
        "--users",
        metavar="FILE",
        type=Path,
        help="only these: one id per line, or a .csv or .parquet with a user column",
    )
    parser.add_argument(
        "--histories",
        metavar="FILE",
        type=Path,
        help="recommend to these histories instead, new users welcome: a .csv, .tsv, .parquet or .jsonl file with "
        "user, item and, if there is one, time; without a time the order of the records counts",
    )
    parser.add_argument(
        "--include-items",
        metavar="FILE",
        type=Path,
        help="recommend these items alone: one id per line, or a file with an item column",
    )
    parser.add_argument("--exclude-items", metavar="FILE", type=Path, help="never recommend these items")
    parser.add_argument(
        "--candidates",
        metavar="FILE|RUN",
        type=Path,
        help="rank these alone: a .csv, .tsv, .parquet or .jsonl file with a user and an item column (for a ranking "
        "run maybe a time and features of events), or items alone, for every user. For a ranking run also a run that "
        "recommends items, which finds the candidates first",
    )
    parser.add_argument(
        "--num-candidates",
        metavar="N",
        type=int,
        default=500,
        help="how many candidates per user the run of --candidates finds (default: %(default)s)",
    )
    parser.add_argument(
        "--by",
        metavar="TASK=W,...",
        help="what a ranking run sorts by: its tasks and their weights (default: its first task)",
    )
    for role in ("user", "item", "time"):
        parser.add_argument(f"--{role}-column", metavar="NAME", help=f"the {role} column of these files")
    parser.add_argument(
        "--item-columns", metavar="A,B", default="", help="also write these columns of the table of --item-info"
    )
    parser.add_argument("--skip-unknown", action="store_true", help="leave out users that the store does not have")
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument(
        "--include-seen",
        action="store_false",
        dest="filter_seen",
        default=None,
        help="also recommend items of the user's history (default: as the run's metrics were measured)",
    )
    seen.add_argument(
        "--exclude-seen", action="store_true", dest="filter_seen", default=None, help="only items that are new to them"
    )
    parser.add_argument("--at", metavar="TIME", help="time of the request, e.g. 2024-05-01T12:00 (default: last event)")
    parser.add_argument("--data", metavar="DIR", type=Path, help="the store of the run, if it was moved")
    parser.add_argument("--which", choices=["best", "last"], default="best", help="checkpoint (default: %(default)s)")
    parser.add_argument("--batch-size", metavar="N", type=int, help="users that share one pass over the catalogue")
    add_device_option(parser)
    add_plugins_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.out.suffix not in FORMATS:
        raise UserError(
            f"--out {args.out} has the ending '{args.out.suffix}'; choose from {', '.join(FORMATS)}."
            f"{did_you_mean(args.out.suffix, FORMATS)}"
        )
    check_writable(args.out, "--out")
    for name in ("users", "histories", "include_items", "exclude_items", "candidates"):
        path = getattr(args, name)
        if path is not None and path.exists() and args.out.exists() and path.samefile(args.out):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"--out {args.out} would replace the file that {option} reads; write to another")
    for name in ("k", "batch_size", "num_candidates"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give at least 1")
    if args.users is not None and args.histories is not None:
        raise UserError("--users names users of the store and --histories brings its own; leave one of them out")
    users = None if args.users is None else read_users(args.users, args.user_column)
    histories = None if args.histories is None else read_table(args.histories, "--histories")
    lists_of_items: dict[str, Any] = {
        name: None if path is None else read_items(path, f"--{name}-items", args.item_column)
        for name, path in (("include", args.include_items), ("exclude", args.exclude_items))
    }

    from turbogr.runs import RunFolder
    from turbogr.tasks import task_class

    if task_class(RunFolder.open(args.folder).settings().get("task", "retrieval")).predicts_actions:
        return rank_candidates(args, users)
    if args.by is not None:
        raise UserError(f"--by is for ranking runs, and {args.folder} recommends items by one score; leave it out")
    if args.candidates is not None:
        _add_candidates(args, lists_of_items)
        if "include_by_user" in lists_of_items and users is None and histories is None:
            pairs = lists_of_items["include_by_user"]
            column = _user_column(args.candidates, pairs.schema.names, args.user_column)
            users = list(dict.fromkeys(pairs.column(column).to_pylist()))

    from turbogr.recommend import load

    recommender = load(args.folder, data=args.data, which=args.which, plugins=args.plugins, device=args.device)
    with tqdm(desc="recommending", unit="user", delay=2, leave=False, disable=None) as bar:
        bar.total = recommender.store.num_users if users is None else len(users)
        bar.total = None if histories is not None else bar.total
        lists = recommender.recommend_batches(
            k=args.k,
            users=users,
            histories=histories,
            filter_seen=False if args.filter_seen is None and args.candidates is not None else args.filter_seen,
            at=args.at,
            unknown="warn" if args.skip_unknown else None,
            batch_size=args.batch_size,
            progress=bar.update,
            user_column=args.user_column if histories is not None else None,
            item_column=args.item_column if histories is not None else None,
            time_column=args.time_column if histories is not None else None,
            **lists_of_items,
        )
        text_users = recommender.store.user_ids.is_text
        if histories is not None:
            text_users = _has_text_users(histories, args.user_column, recommender.store)
        text_ids = (text_users, recommender.store.item_ids.is_text)
        example: list[str] = []
        lists = _with_example(lists, recommender.item_info, example)
        about = partial(recommender.item_columns, names=[name for name in args.item_columns.split(",") if name])
        num_rows, num_empty = write_recommendations(args.out, lists, *text_ids, about)
    print("".join(f"{line}\n" for line in example), end="")
    precision = recommender.precision
    computed = "" if precision == "fp32" else f" (the model computes in {precision})"
    print(f"{num_rows:,} recommendations written to {args.out}{computed}", file=sys.stderr)
    if num_empty:
        why = "they have seen every item; --include-seen recommends these again"
        if args.candidates is not None:
            why = "none of their candidates is known"
        elif args.include_items is not None or args.exclude_items is not None:
            why = "no candidate is left that they have not seen"
        print(f"{num_empty:,} users have no row: {why}", file=sys.stderr)
    return 0


def _add_candidates(args: argparse.Namespace, lists_of_items: dict[str, Any]) -> None:
    """Restrict what a recommender may return to the candidates of a file."""
    if args.candidates.is_dir():
        raise UserError(
            f"--candidates {args.candidates} is a folder; candidates of a run are for a ranking run, and {args.folder} "
            "finds items itself. Name the ranking run as RUN, or give a file of candidates"
        )
    if args.include_items is not None:
        raise UserError("--include-items and --candidates both say which items may come; leave one of them out")
    table = _pairs(args.candidates, args.user_column, args.item_column)
    if table is None:
        lists_of_items["include"] = read_items(args.candidates, "--candidates", args.item_column)
    else:
        lists_of_items["include_by_user"] = table


def _pairs(path: Path, user_column: str | None, item_column: str | None) -> pa.Table | None:
    """Return the table of a file of candidates, None where it has items alone."""
    if path.suffix.lower() not in TABLES:
        return None
    table = read_table(path, "--candidates")
    alone = len(table.schema.names) == 1 or (user_column is None and not usual_columns("user", table.schema.names))
    if not alone:
        return table
    if len(table.schema.names) > 1:
        raise UserError(
            f"which column of {path} has the users? Name it with --user-column, or give a file with the item column "
            f"alone. Columns: {', '.join(table.schema.names)}"
        )
    return None


def rank_candidates(args: argparse.Namespace, users: list[Any] | None) -> int:
    """Rank the candidates of a file, or those that another run finds, with a ranking run; return the exit status."""
    if args.candidates is None:
        raise UserError(
            f"{args.folder} is a ranking run, which sorts given candidates: add --candidates FILE with a user and an "
            "item per record, or --candidates RUN, a run that finds them"
        )
    for name in ("histories", "include_items", "exclude_items", "item_columns"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} is not for ranking runs; leave it out")
    from turbogr.ranker import load_ranker

    by = _weights(args.by)
    source, table = None, None
    if args.candidates.is_dir():
        from turbogr.recommend import load

        source = load(args.candidates, plugins=args.plugins, device=args.device)
    elif args.filter_seen is not None:
        raise UserError("--include-seen and --exclude-seen are for candidates that a run finds; leave them out")
    else:
        table = _pairs(args.candidates, args.user_column, args.item_column)
    ranker = load_ranker(args.folder, data=args.data, which=args.which, plugins=args.plugins, device=args.device)
    ranker.weights(by)
    with tqdm(desc="ranking", unit="user", delay=2, leave=False, disable=None) as bar:
        if source is not None:
            found = source.recommend_batches(
                k=args.num_candidates,
                users=users,
                filter_seen=args.filter_seen,
                at=args.at,
                unknown="warn" if args.skip_unknown else None,
                batch_size=args.batch_size,
            )
            bar.total = source.store.num_users if users is None else len(users)
            lists = ranker.rerank(found, args.k, by=by, at=args.at, progress=bar.update)
            text_users = source.store.user_ids.is_text
        elif table is not None:
            if users is not None:
                raise UserError("--users and a file of candidates with users both say who is asked for; omit --users")
            columns = NamedColumns(args.user_column, args.item_column, args.time_column)
            lists = ranker.rank_batches(table, args.k, by=by, at=args.at, columns=columns, progress=bar.update)
            text_users = _has_text_users(table, args.user_column, ranker.store)
        else:
            items = read_items(args.candidates, "--candidates", args.item_column)
            lists = ranker.rank_items(users, items, args.k, by=by, at=args.at, progress=bar.update)
            text_users = ranker.store.user_ids.is_text
        text_ids = (text_users or ranker.store.user_ids.is_text, ranker.store.item_ids.is_text)
        num_rows, num_empty = write_recommendations(
            args.out, lists, *text_ids, predictions=list(ranker.task.ranking.tasks)
        )
    print(f"{num_rows:,} ranked candidates written to {args.out}", file=sys.stderr)
    if num_empty:
        print(f"{num_empty:,} users have no row: they have no candidate", file=sys.stderr)
    return 0


def _weights(text: str | None) -> dict[str, float] | None:
    """Return the weights of tasks in a text such as click=1,stay=0.5; a task alone has 1."""
    if text is None:
        return None
    weights = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        try:
            weights[name.strip()] = float(value) if equals else 1.0
        except ValueError:
            raise UserError(f"--by has '{part}'; give tasks and weights, such as is_click=1,long_view=0.5") from None
    return weights


def _has_text_users(histories: pa.Table, named: str | None, store: Store) -> bool:
    column = find_column("user", histories.schema.names, store, NamedColumns(user=named), "the table of events")
    return column is None or not pa.types.is_integer(histories.schema.field(column).type)


def _with_example(
    lists: Generator[Recommendations, None, None], info: ItemInfo | None, example: list[str]
) -> Generator[Recommendations, None, None]:
    """Yield the lists, and write the first user's best items with their titles to `example`, if there are titles."""
    for some in lists:
        if info is not None and info.has_titles and not example and len(some.positions):
            num = min(_EXAMPLE_ITEMS, int((some.user_ids == some.user_ids[0]).sum()))
            example.append(f"for example user {one_line(str(some.user_ids[0]))}:")
            titles = info.titles_of(some.item_ids[:num])
            for item, title in zip(some.item_ids[:num].tolist(), titles, strict=True):
                example.append(f"  {one_line(str(item))}  {one_line(title or '')}".rstrip())
        yield some


def read_users(path: Path, column: str | None = None) -> list[Any]:
    """Return the raw user ids of a file, each once, in the order of the file.

    A .parquet, .csv or .tsv file has a user column: `column`, or one with a usual name, or the only one. Any other file
    has one id per line.

    Raises:
        UserError: no such file or column, a row without an id, no id at all, or a file that is not of the format of its
            name.
        OSError: the file cannot be opened.
    """
    try:
        if path.suffix == ".parquet":
            ids = _parquet_ids(path, column)
        elif path.suffix in (".csv", ".tsv"):
            ids = _delimited_ids(path, column)
        elif column is not None:
            raise UserError(f"--user-column is for .csv, .tsv and .parquet files; {path} has one id per line")
        else:
            ids = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except FileNotFoundError:
        raise UserError(f"--users {path}: there is no such file; it is a file of user ids, one per line") from None
    except (pa.ArrowInvalid, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the users of {path}: {str(error).splitlines()[0]}") from error
    missing = next((place for place, raw in enumerate(ids) if raw is None or raw == ""), None)
    if missing is not None:
        raise UserError(f"{path}: row {missing + 1} has no user id; remove it")
    if not ids:
        raise UserError(f"{path} has no user in it; leave --users out to take all users")
    distinct = list(dict.fromkeys(ids))
    if len(distinct) < len(ids):
        print(f"{len(ids) - len(distinct):,} users are in {path} more than once; each is taken once", file=sys.stderr)
    return distinct


def _parquet_ids(path: Path, column: str | None) -> list[Any]:
    names = pa.parquet.read_schema(path).names
    table = pa.parquet.read_table(path, columns=[_user_column(path, names, column)])
    ids: list[Any] = table.column(0).to_pylist()
    return ids


def _delimited_ids(path: Path, column: str | None) -> list[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter_of(path))
        names = next(rows, [])
        if not names:
            return []
        place = names.index(_user_column(path, names, column))
        return [row[place].strip() if place < len(row) else None for row in rows if row]


def _user_column(path: Path, names: list[str], asked: str | None) -> str:
    if asked is not None:
        if asked not in names:
            raise UserError(f"{path} has no column '{asked}'.{did_you_mean(asked, names)} Columns: {', '.join(names)}")
        return asked
    known = [name for name in names if name.lower() in _USER_COLUMNS]
    if known or len(names) == 1:
        return known[0] if known else names[0]
    raise UserError(f"which column of {path} has the users? Give it with --user-column. Columns: {', '.join(names)}")


def write_recommendations(
    path: Path,
    lists: Generator[Recommendations, None, None],
    text_users: bool,
    text_items: bool,
    about: Callable[[NDArray[Any]], dict[str, pa.Array]] = lambda items: {},
    predictions: Sequence[str] = (),
) -> tuple[int, int]:
    """Write lists to a .parquet, .csv or .jsonl file as they come; return the number of rows and of users without any.

    `about` returns columns about raw items by name; `predictions` are tasks whose values the lists have. The file is
    replaced when it is complete; until then, and after a failure, an older file of that name stays.
    """
    schema = pa.schema(
        {
            "user_id": pa.string() if text_users else pa.int64(),
            "item_id": pa.string() if text_items else pa.int64(),
            "rank": pa.int32(),
            "score": pa.float32(),
        }
    )
    for name, column in about(np.zeros(0, object if text_items else np.int64)).items():
        schema = schema.append(pa.field(name, column.type))
    for name in predictions:
        schema = schema.append(pa.field(name, pa.float32()))
    num_rows = num_empty = 0
    with closing(lists), atomic_file(path, follow_link=True) as aside, _WRITERS[path.suffix](aside, schema) as write:
        for some in lists:
            columns: list[Any] = [some.user_ids, some.item_ids, some.positions, some.scores]
            columns += about(some.item_ids).values()
            columns += [getattr(some, "predictions", {})[name].astype(np.float32) for name in predictions]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            write(pa.record_batch(arrays, schema=schema))
            num_rows += len(some.positions)
            num_empty += some.num_empty
    return num_rows, num_empty


Write = Callable[[pa.RecordBatch], None]


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[Write]:
    """Write rows in groups of at least `_ROW_GROUP`, which readers handle well."""
    collected: list[pa.RecordBatch] = []
    with pa.parquet.ParquetWriter(path, schema) as writer:

        def write(batch: pa.RecordBatch) -> None:
            collected.append(batch)
            if sum(len(part) for part in collected) >= _ROW_GROUP:
                writer.write_table(pa.Table.from_batches(collected))
                collected.clear()

        yield write
        if collected:
            writer.write_table(pa.Table.from_batches(collected))


@contextmanager
def _csv(path: Path, schema: pa.Schema) -> Iterator[Write]:
    options = pa.csv.WriteOptions(include_header=False, quoting_style="needed")
    with path.open("wb") as file:
        file.write((",".join(schema.names) + "\n").encode())  # Arrow would quote the names
        with pa.csv.CSVWriter(file, schema, write_options=options) as writer:
            yield writer.write_batch


@contextmanager
def _jsonl(path: Path, schema: pa.Schema) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", newline="\n") as file:

        def write(batch: pa.RecordBatch) -> None:
            rows = batch.to_pylist()
            for name in (field.name for field in schema if field.type == pa.float32()):
                digits = batch.column(name).to_numpy().astype(str).tolist()  # the shortest exact ones
                for row, value in zip(rows, digits, strict=True):
                    row[name] = float(value)
            lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
            file.write("".join(f"{line}\n" for line in lines))

        yield write


_WRITERS = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}
