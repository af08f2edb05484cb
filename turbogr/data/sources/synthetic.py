"""Synthetic short-video log: long-tailed users, Zipf items, drifting interests, sessions, times that matter.

How a user behaves. The catalogue is cut into topics, a topic into series of episodes. A user holds a few long-term
interests (topics), which are exchanged one by one over the sessions. A session has a main and a side interest, and
each event continues one of the two where the user left off in it: usually with the next episode, sometimes with the
next series of the topic. A few events are something popular instead. After a long pause a new session starts, with
interests drawn anew.

So the next item follows from the last item *of the right interest*, often not the last item of the log; a long pause
tells that older interests come back. A model of order and time can see that, a first-order chain cannot.

Every quantity is a hash of (seed, user, position), so the log does not depend on how it is cut into blocks, and any
number of users is generated without holding the others.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from turbogr.data.columns import choose_columns
from turbogr.data.progress import Progress
from turbogr.data.ranges import concatenated_ranges
from turbogr.data.sources.block import OF_ANY_LOG, Block, Columns, ReadOptions, Source
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, nearest

_START = 1_650_000_000
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EPISODES = 10
_BLOCK_EVENTS = 1 << 19


@dataclass(frozen=True)
class Synthetic:
    """Settings of the synthetic log.

    Attributes:
        mean_length, median_length, max_length, min_length: events per user; log-normal between the bounds.
        num_topics: topics of the catalogue; 0 chooses about the square root of the number of items.
        interests: long-term interests of a user at a time.
        session_length: mean events per session.
        drift: sessions after which an interest is exchanged for another.
        noise: share of events that are something popular instead of a continuation.
        side: share of a session's events that continue its side interest.
        abandon: share of events that leave the series for the next one before its end.
        zipf: exponent of the popularity of topics, of series and of the noise.
    """

    num_users: int = 6000
    num_items: int = 3000
    mean_length: float = 60.0
    median_length: float = 42.0
    max_length: int = 400
    min_length: int = 5
    num_topics: int = 0
    interests: int = 5
    session_length: float = 6.0
    drift: int = 40
    noise: float = 0.08
    side: float = 0.4
    abandon: float = 0.08
    zipf: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        mean = f"--mean-length ({self.mean_length:g})"
        checks = {
            "num_users": (self.num_users >= 2, "be at least 2"),
            "num_items": (self.num_items >= 2, "be at least 2"),
            "median_length": (1 <= self.median_length <= self.mean_length, f"lie between 1 and {mean}"),
            "min_length": (1 <= self.min_length <= self.mean_length, f"lie between 1 and {mean}"),
            "max_length": (self.max_length >= self.mean_length, f"be at least {mean}"),
            "interests": (self.interests >= 1, "be at least 1"),
            "session_length": (self.session_length >= 1, "be at least 1"),
            "drift": (self.drift >= 1, "be at least 1"),
            **{name: (0 <= getattr(self, name) < 1, "lie in [0, 1)") for name in ("noise", "side", "abandon")},
            "zipf": (self.zipf >= 0, "not be negative"),
        }
        for name, (good, demand) in checks.items():
            if not good:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"synthetic data: {option} must {demand}, but it is {getattr(self, name)}")

    @property
    def topics(self) -> int:
        """Number of topics, each with at least one series."""
        wanted = self.num_topics or round(math.sqrt(self.num_items))
        return max(1, min(wanted, self.num_items // self.episodes))

    @property
    def episodes(self) -> int:
        return min(_EPISODES, self.num_items)


PRESETS: dict[str, dict[str, Any]] = {
    "demo": {},
    "kuairand-27k": {
        "num_users": 27_285,
        "num_items": 32_038_725,
        "mean_length": 11_796.0,
        "median_length": 8_591.0,
        "max_length": 228_000,
        "min_length": 10,
    },
}


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(seed: int, stream: int, *keys: Any) -> Any:
    """Hash integer arrays to uniform 64-bit words; different streams are independent."""
    state: Any = np.uint64((seed * 0x2545F4914F6CDD1D + stream * 0xD1342543DE82EF95 + 1) % 2**64)
    for key in keys:
        state = _mix((np.asarray(key).astype(np.uint64) * _GOLDEN) ^ state)
        state = state + _GOLDEN
    return state


def _uniform(words: Any) -> Any:
    """Map words to (0, 1)."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _normal(words: Any) -> Any:
    """Map words to standard normal numbers (Box and Muller, one hash for both uniforms)."""
    first = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    second = ((words & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-32
    return np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * math.pi * second)


def _zipf(uniform: Any, num: Any, exponent: float) -> Any:
    """Ranks 0..num - 1 with probability about (rank + 1) ** -exponent, by the inverse of the integrated density."""
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        ranks = np.exp(uniform * np.log(np.asarray(num) + 1.0)) - 1.0
    else:
        ranks = (1.0 + uniform * ((np.asarray(num) + 1.0) ** power - 1.0)) ** (1.0 / power) - 1.0
    return np.minimum(ranks.astype(np.int64), np.asarray(num) - 1)


def user_lengths(settings: Synthetic, users: Int64Array) -> Any:
    """Events of each of `users`: log-normal with the median and mean of the settings, within the bounds."""
    sigma = math.sqrt(2.0 * math.log(settings.mean_length / settings.median_length))
    lengths = settings.median_length * np.exp(sigma * _normal(_hash(settings.seed, 1, users)))
    return np.clip(np.rint(lengths), settings.min_length, settings.max_length).astype(np.int64)


def count_events(settings: Synthetic) -> int:
    """Return the number of events of the whole log."""
    with np.errstate(over="ignore"):
        return int(user_lengths(settings, np.arange(settings.num_users, dtype=np.int64)).sum())


@dataclass(frozen=True)
class Events:
    """A block of the log, users ascending and each in time order; all [events]."""

    users: Int64Array
    items: Int64Array
    times: Int64Array
    likes: NDArray[np.int8]
    watch_seconds: Int64Array


def generate(settings: Synthetic, first: int, last: int) -> Events:
    """Make the events of the users first..last - 1."""
    with np.errstate(over="ignore"):
        return _generate(settings, np.arange(first, last, dtype=np.int64))


def _generate(s: Synthetic, block_users: Int64Array) -> Events:
    lengths = user_lengths(s, block_users)
    users = np.repeat(block_users, lengths)
    positions = concatenated_ranges(np.zeros_like(lengths), lengths)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    words = _hash(s.seed, 2, users, positions)
    field = [((words >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.float64) / 65536.0 for k in range(4)]

    new_session = (field[0] < 1.0 / s.session_length) | (positions == 0)
    sessions = np.cumsum(new_session)
    sessions -= sessions[starts]
    times = _times(s, users, positions, starts, new_session)
    slots = _interests(s, users, sessions, field[1] < s.side)
    eras = (sessions + (_hash(s.seed, 4, users, slots) % np.uint64(s.drift)).astype(np.int64)) // s.drift
    topics = _zipf(_uniform(_hash(s.seed, 5, users, slots, eras)), s.topics, s.zipf)
    episodes = _episodes(s, users, slots, eras, topics, field[2] < s.abandon)
    noise = field[3] < s.noise
    popular = _zipf(_uniform(_hash(s.seed, 6, users[noise], positions[noise])), s.num_items, max(s.zipf, 1.1))
    episodes[noise] = _scatter(popular, s.num_items, 2)
    liking = _hash(s.seed, 7, users, positions)
    return Events(
        users=users,
        items=_scatter(episodes, s.num_items, 1),
        times=times,
        likes=(_uniform(liking) < np.where(noise, 0.01, 0.05)).astype(np.int8),
        watch_seconds=(5.0 + 3.0 * np.exp(_normal(_mix(liking)))).astype(np.int64),
    )


def _times(
    s: Synthetic, users: Int64Array, positions: Int64Array, starts: Int64Array, new_session: NDArray[np.bool_]
) -> Any:
    """Seconds: pauses of about half a minute within a session, of most of a day between sessions."""
    normal = _normal(_hash(s.seed, 3, users, positions))
    gaps = np.where(new_session, 3600.0 + 50_000.0 * np.exp(0.9 * normal), 1.0 + 25.0 * np.exp(0.8 * normal))
    clock = np.cumsum(gaps.astype(np.int64))
    joined = (_hash(s.seed, 8, users) % np.uint64(30 * 86400)).astype(np.int64)
    return _START + joined + clock - clock[starts]


def _interests(s: Synthetic, users: Int64Array, sessions: Int64Array, side: NDArray[np.bool_]) -> Any:
    """The interest (0..interests - 1) that each event continues: the session's main one, or its side one."""
    words = _hash(s.seed, 9, users, sessions)
    main = _zipf(_uniform(words), s.interests, 0.5)
    if s.interests == 1:
        return main
    other = (_mix(words) % np.uint64(s.interests - 1)).astype(np.int64)
    return np.where(side, (main + 1 + other) % s.interests, main)


def _episodes(
    s: Synthetic,
    users: Int64Array,
    slots: Int64Array,
    eras: Int64Array,
    topics: Int64Array,
    abandon: NDArray[np.bool_],
) -> Int64Array:
    """Place in the catalogue of each event: where its user stands in the series of the interest it continues."""
    key = ((users - users[0]) * s.interests + slots) * (int(eras.max(initial=0)) + 1) + eras
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.ones(len(key), bool)
    np.not_equal(key[1:], key[:-1], out=first[1:])
    index = np.arange(len(key))
    group = np.maximum.accumulate(np.where(first, index, 0))
    fresh = abandon[order] | first
    left_off = index - np.maximum.accumulate(np.where(fresh, index, 0))
    changes = np.cumsum(fresh)
    series = changes - changes[group] + left_off // s.episodes

    num_series = s.num_items // s.episodes
    base, extra = divmod(num_series, s.topics)
    topic = topics[order]
    size = base + (topic < extra)
    offset = topic * base + np.minimum(topic, extra)
    entry = _zipf(_uniform(_hash(s.seed, 10, users[order], slots[order], eras[order])), size, s.zipf)
    places = np.empty(len(key), np.int64)
    places[order] = (offset + (entry[group] + series) % size) * s.episodes + left_off % s.episodes
    return places


def _scatter(places: Int64Array, num: int, which: int) -> Int64Array:
    """A fixed bijection of 0..num - 1, so that neighbouring raw ids mean nothing."""
    step = int(num * (0.6180339887 if which == 1 else 0.7548776662)) | 1
    while math.gcd(step, num) != 1:
        step += 2
    return (places * step + 7919) % num


def user_blocks(settings: Synthetic, max_events: int = _BLOCK_EVENTS) -> list[tuple[int, int]]:
    """Cut the users into blocks of about `max_events` events."""
    with np.errstate(over="ignore"):
        ends = np.cumsum(user_lengths(settings, np.arange(settings.num_users, dtype=np.int64)))
    blocks = []
    first, done = 0, 0
    while first < settings.num_users:
        last = max(int(np.searchsorted(ends, done + max_events, side="right")), first + 1)
        blocks.append((first, last))
        first, done = last, int(ends[last - 1])
    return blocks


_COLUMNS = ("user_id", "item_id", "timestamp", "is_like", "watch_seconds")
_SCHEMA = pa.schema([(name, pa.int8() if name == "is_like" else pa.int64()) for name in _COLUMNS])


def _columns(events: Events) -> dict[str, pa.Array]:
    values = (events.users, events.items, events.times, events.likes, events.watch_seconds)
    return {name: pa.array(column) for name, column in zip(_COLUMNS, values, strict=True)}


@dataclass
class SyntheticReader:
    """Generates the log block by block."""

    settings: Synthetic
    columns: Columns
    texts_may_be_numbers: bool = False
    unit: str = "rows"

    def __post_init__(self) -> None:
        self.size = count_events(self.settings)

    def blocks(self) -> Iterator[Callable[[], Block]]:
        return (partial(self._block, first, last) for first, last in user_blocks(self.settings))

    def _block(self, first: int, last: int) -> Block:
        columns = _columns(generate(self.settings, first, last))
        rows = len(columns["user_id"])
        wanted = {name: columns[name] for name in self.columns.names}
        return Block(wanted, rows, lambda k: f"synthetic user {columns['user_id'][k]}", rows)


def check_log_path(path: Path) -> None:
    """Raise UserError where a log cannot be written to `path` because something is there."""
    if os.path.lexists(path):
        raise UserError(f"{path} already exists; remove it or choose another --log")


def write_log(settings: Synthetic, path: Path, *, progress: bool = False) -> int:
    """Write the raw log as Parquet (a .parquet file, or a folder of them) or CSV, and return its number of events.

    Within a block of users the rows are in time order, as in a log that was collected shard by shard. The log appears
    under its name when it is complete.

    Raises:
        UserError: `path` exists.
    """
    check_log_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    _remove(aside)  # what a killed writer left
    total = count_events(settings)
    try:
        with _LogWriter(aside, path.suffix) as writer, Progress(progress).stage("writing log", total, "rows") as bar:
            for first, last in user_blocks(settings):
                events = generate(settings, first, last)
                order = pa.array(np.argsort(events.times, kind="stable"))
                writer.write(pa.table(_columns(events)).take(order))
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

    def __init__(self, path: Path, suffix: str) -> None:
        self._folder: Path | None = None
        self._parts = 0
        self._file: Any = None
        if suffix in (".csv", ".parquet"):
            writer = pacsv.CSVWriter if suffix == ".csv" else pq.ParquetWriter
            self._file = writer(str(path), _SCHEMA)
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


def synthetic_settings(extra: dict[str, Any]) -> Synthetic:
    """Build settings from a preset and single values; raises UserError for an unknown name."""
    given = {name: value for name, value in extra.items() if value is not None}
    preset = given.pop("preset", "demo")
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: use {' or '.join(PRESETS)}.{nearest(preset, PRESETS)}")
    known = {field.name for field in fields(Synthetic)}
    for name in given:
        if name not in known:
            raise UserError(f"the synthetic source has no setting {name!r}.{nearest(name, known)}")
    return Synthetic(**{**PRESETS[preset], **given})


def open_synthetic(paths: Sequence[Path], options: ReadOptions) -> SyntheticReader:
    """Open the generator; it reads no files."""
    if paths:
        raise UserError(f"the synthetic source reads no files, but {paths[0]} was given")
    columns = choose_columns(_COLUMNS, options, "the synthetic source")
    return SyntheticReader(synthetic_settings(options.extra), columns)


SYNTHETIC = Source(
    "synthetic",
    "a generated log with the statistics of short-video logs",
    open_synthetic,
    OF_ANY_LOG,
    extra={"preset": "demo", **{field.name: None for field in fields(Synthetic)}},
)
