"""The synthetic source: a generated log, prepared as it is generated or written to files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from turbogr.data.prepare.columns import choose_columns
from turbogr.data.prepare.progress_bar import Progress
from turbogr.data.prepare.source import (
    OF_ANY_LOG,
    Block,
    Columns,
    OwnTables,
    ReadOptions,
    Source,
    option,
    register_built_in,
)
from turbogr.data.prepare.sources import feature_generator
from turbogr.data.prepare.sources.event_generator import PRESETS, Events, Synthetic, count_events, generate, user_blocks
from turbogr.errors import UserError, did_you_mean

NAME = "synthetic"
_FILL_LENGTH = 2048
_NO_SETTINGS = ("preset", "with_features")
_COLUMNS = ("user_id", "item_id", "timestamp", "is_like", "watch_seconds")
_SMALL = ("is_like", *feature_generator.ACTIONS)


def _schema(with_features: bool) -> pa.Schema:
    names = (*_COLUMNS, *(feature_generator.COLUMNS if with_features else ()))
    return pa.schema([(name, pa.int8() if name in _SMALL else pa.int64()) for name in names])


def _columns(settings: Synthetic, events: Events, with_features: bool) -> dict[str, pa.Array]:
    values = (events.users, events.items, events.times, events.likes, events.watch_seconds)
    found = {name: pa.array(column) for name, column in zip(_COLUMNS, values, strict=True)}
    return found | feature_generator.event_columns(settings, events) if with_features else found


@dataclass
class SyntheticReader:
    """Generates the log block by block."""

    settings: Synthetic
    columns: Columns
    with_features: bool = False
    texts_may_be_numbers: bool = False
    unit: str = "records"

    def __post_init__(self) -> None:
        self.size = count_events(self.settings)

    def blocks(self) -> Iterator[Callable[[], Block]]:
        return (partial(self._block, first, last) for first, last in user_blocks(self.settings))

    def _block(self, first: int, last: int) -> Block:
        columns = _columns(self.settings, generate(self.settings, first, last), self.with_features)
        wanted = {name: columns[name] for name in self.columns.names}
        return Block(wanted, lambda k: f"synthetic user {columns['user_id'][k]}", len(columns["user_id"]))


def check_log_path(path: Path) -> None:
    """Raise UserError where a log cannot be written to `path` because something is there."""
    if os.path.lexists(path):
        raise UserError(f"{path} already exists; remove it or choose another --log")


def write_log(settings: Synthetic, path: Path, *, with_features: bool = False, progress: bool = False) -> int:
    """Write the raw log as Parquet (a .parquet file, or a folder of them) or CSV, and return its number of events.

    Within a block of users the records are in time order, as in a log that was collected shard by shard. The log gets
    its name when it is complete.

    Raises:
        UserError: `path` exists.
    """
    check_log_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    _remove(aside)  # left by a writer that was killed
    total = count_events(settings)
    try:
        with (
            _LogWriter(aside, path.suffix, _schema(with_features)) as writer,
            Progress(progress).stage("writing log", total, "records") as bar,
        ):
            for first, last in user_blocks(settings):
                events = generate(settings, first, last)
                order = pa.array(np.argsort(events.times, kind="stable"))
                writer.write(pa.table(_columns(settings, events, with_features)).take(order))
                bar.update(len(events.users))
        os.replace(aside, path)
    except BaseException:
        _remove(aside)
        raise
    return total


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class _LogWriter:
    """Writes tables to one CSV file, one Parquet file, or a folder with a Parquet file each."""

    def __init__(self, path: Path, suffix: str, schema: pa.Schema) -> None:
        self._folder: Path | None = None
        self._parts = 0
        self._file: Any = None
        if suffix in (".csv", ".parquet"):
            writer = pacsv.CSVWriter if suffix == ".csv" else pq.ParquetWriter
            self._file = writer(str(path), schema)
        else:
            path.mkdir()
            self._folder = path

    def write(self, table: pa.Table) -> None:
        if self._folder is None:
            self._file.write_table(table)
        else:
            pq.write_table(table, self._folder / f"part-{self._parts:05d}.parquet")
            self._parts += 1

    def __enter__(self) -> _LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class SyntheticOptions:
    """A preset of `Synthetic`, and values that replace single settings of it."""

    preset: str = option("demo", "demo or kuairand-27k; the other options change single values of it")
    num_users: int | None = option(None, "users of the log")
    num_items: int | None = option(None, "items of the catalogue")
    mean_length: float | None = option(None, "mean events per user")
    median_length: float | None = option(None, "median events per user")
    max_length: int | None = option(None, "most events of a user")
    min_length: int | None = option(None, "fewest events of a user")
    fill: float | None = option(
        None, "mean length, after cutting at --fill-length, as a share of it; scales all lengths"
    )
    fill_length: int | None = option(None, "length at which a model cuts sequences; 2048 with --fill")
    num_topics: int | None = option(None, "topics of the catalogue")
    interests: int | None = option(None, "interests of a user at a time")
    session_length: float | None = option(None, "mean events per session")
    drift: int | None = option(None, "sessions after which an interest is exchanged")
    noise: float | None = option(None, "share of events that are something popular")
    side: float | None = option(None, "share of events that continue the side interest of a session")
    abandon: float | None = option(None, "share of events that leave a series early")
    zipf: float | None = option(None, "exponent of the popularity")
    seed: int | None = option(None, "seed of the generator")
    with_features: bool | None = option(
        None, "items and users have features, and events the actions is_click and long_view"
    )

    def own_tables(self) -> OwnTables | None:
        """Return the tables of features that come with the log, if any."""
        if not self.with_features:
            return None
        settings = self.settings()
        return OwnTables(
            feature_generator.item_table(settings),
            feature_generator.user_table(settings),
            feature_generator.ACTIONS,
            feature_generator.EVENT_FEATURES,
        )

    def settings(self) -> Synthetic:
        """Return the settings; raises UserError for an unknown preset or a value out of range."""
        if self.preset not in PRESETS:
            known = " or ".join(PRESETS)
            raise UserError(f"unknown preset {self.preset!r}: use {known}.{did_you_mean(self.preset, PRESETS)}")
        given = {name: value for name, value in vars(self).items() if name not in _NO_SETTINGS and value is not None}
        settings = {**PRESETS[self.preset], **given}
        if self.fill is not None:
            length = settings.setdefault("fill_length", _FILL_LENGTH)
            if self.max_length is None:  # of a preset with short users, such as demo
                settings["max_length"] = max(length, settings.get("max_length", Synthetic.max_length))
        return Synthetic(**settings)


def open_synthetic(paths: Sequence[Path], options: ReadOptions) -> SyntheticReader:
    """Open the generator; it reads no files."""
    if paths:
        raise UserError(f"the synthetic source reads no files, but {paths[0]} was given")
    with_features = bool(options.own.with_features)
    names = (*_COLUMNS, *(feature_generator.COLUMNS if with_features else ()))
    columns = choose_columns(names, options, "the synthetic source")
    return SyntheticReader(options.own.settings(), columns, with_features)


register_built_in(
    Source(
        NAME,
        "a generated log with the statistics of short-video logs",
        open_synthetic,
        OF_ANY_LOG,
        config=SyntheticOptions,
    )
)
