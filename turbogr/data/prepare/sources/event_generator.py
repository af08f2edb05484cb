"""The generator of synthetic short-video logs: long-tailed users, Zipf items, drifting interests, sessions, times.

How a user behaves. The catalogue is cut into topics, a topic into series of episodes. A user holds a few long-term
interests (topics), which are exchanged one by one over the sessions. A session has a main and a side interest, and
each event continues one of the two where the user left off in it: usually with the next episode, sometimes with the
next series of the topic. A few events are something popular instead. After a long pause a new session starts, with
interests drawn again.

So the next item depends on the last item *of the right interest*, often not the last item of the log; a long pause
means that older interests come back. A model of order and time can learn that, a first-order chain cannot.

Every quantity is a hash of (seed, user, position), so the log does not depend on how it is cut into blocks, and any
number of users is generated without holding the others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.data.ranges import concatenated_ranges, cut_by_budget, offsets_of
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError
from turbogr.random import GOLDEN64, mix64

_START = 1_650_000_000
_GOLDEN = np.uint64(GOLDEN64)
_EPISODES = 10
_BLOCK_EVENTS = 1 << 19
_FITTED_USERS = 1 << 20  # users whose lengths decide the scale of all lengths


@dataclass(frozen=True)
class Synthetic:
    """Settings of the synthetic log.

    Attributes:
        mean_length, median_length, max_length, min_length: events per user; log-normal between the bounds.
        fill, fill_length: if set, lengths are scaled such that they are, cut at `fill_length`, `fill` of it in the
            mean. Their spread, mean ÷ median before cutting, stays.
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
    fill: float | None = None
    fill_length: int | None = None
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
        self._check_fill()

    def _check_fill(self) -> None:
        if self.fill is None and self.fill_length is None:
            return
        if self.fill is None or self.fill_length is None:
            given, missing = ("--fill-length", "--fill") if self.fill is None else ("--fill", "--fill-length")
            raise UserError(
                f"synthetic data: {given} needs {missing}; give both, such as --fill 0.5 --fill-length 2048"
            )
        most = min(self.max_length, self.fill_length)
        if not self.min_length < self.fill * self.fill_length < most:
            raise UserError(
                f"synthetic data: --fill {self.fill:g} of --fill-length {self.fill_length} is a mean of "
                f"{self.fill * self.fill_length:,.1f} events, which must lie between --min-length ({self.min_length}) "
                f"and the smaller of --max-length ({self.max_length}) and --fill-length; change one of them"
            )

    @functools.cached_property
    def scale(self) -> float:
        """The factor of all lengths that gives the wanted fill; 1 where none is wanted."""
        if self.fill is None or self.fill_length is None:
            return 1.0
        users = np.arange(min(self.num_users, _FITTED_USERS), dtype=np.int64)
        with np.errstate(over="ignore"):
            raw = _raw_lengths(self, users)
        most = min(self.max_length, self.fill_length)
        return scale_to_mean(raw, self.fill * self.fill_length, self.min_length, most)

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


def hash_words(seed: int, stream: int, *keys: Any) -> Any:
    """Hash integer arrays to uniform 64-bit words; different streams are independent."""
    state: Any = np.uint64((seed * 0x2545F4914F6CDD1D + stream * 0xD1342543DE82EF95 + 1) % 2**64)
    for key in keys:
        state = mix64((np.asarray(key).astype(np.uint64) * _GOLDEN) ^ state)
        state = state + _GOLDEN
    return state


def uniform(words: Any) -> Any:
    """Map words to (0, 1)."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(words: Any) -> Any:
    """Map words to standard normal numbers (Box and Muller, one hash for both uniforms)."""
    first = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    second = ((words & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-32
    return np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * math.pi * second)


def _zipf(uniform: Any, num: Any, exponent: float) -> Any:
    """Integers k in 0..num - 1 with probability about (k + 1) ** -exponent, by inverting the integrated density."""
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        drawn = np.exp(uniform * np.log(np.asarray(num) + 1.0)) - 1.0
    else:
        drawn = (1.0 + uniform * ((np.asarray(num) + 1.0) ** power - 1.0)) ** (1.0 / power) - 1.0
    return np.minimum(drawn.astype(np.int64), np.asarray(num) - 1)


def user_lengths(settings: Synthetic, users: Int64Array) -> Any:
    """Events of each of `users`: log-normal with the median and mean of the settings, within the bounds."""
    lengths = settings.scale * _raw_lengths(settings, users)
    return np.clip(np.rint(lengths), settings.min_length, settings.max_length).astype(np.int64)


def _raw_lengths(settings: Synthetic, users: Int64Array) -> NDArray[np.float64]:
    sigma = length_spread(settings.mean_length, settings.median_length)
    lengths: NDArray[np.float64] = settings.median_length * np.exp(sigma * normal(hash_words(settings.seed, 1, users)))
    return lengths


def length_spread(mean: float, median: float) -> float:
    """Return the standard deviation of the logarithm of log-normal lengths."""
    return math.sqrt(2.0 * math.log(mean / median))


def scale_to_mean(lengths: NDArray[np.float64], mean: float, shortest: int, longest: int) -> float:
    """Return the factor with which positive `lengths`, kept between `shortest` and `longest`, have this `mean`."""
    low, high = 0.0, longest / float(lengths.min())
    for _ in range(80):  # bisect
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if np.clip(lengths * middle, shortest, longest).mean() < mean else (low, middle)
    return high


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
    words = hash_words(s.seed, 2, users, positions)
    field = [((words >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.float64) / 65536.0 for k in range(4)]

    new_session = (field[0] < 1.0 / s.session_length) | (positions == 0)
    sessions = np.cumsum(new_session)
    sessions -= sessions[starts]
    times = _times(s, users, positions, starts, new_session)
    slots = _interests(s, users, sessions, field[1] < s.side)
    eras = (sessions + (hash_words(s.seed, 4, users, slots) % np.uint64(s.drift)).astype(np.int64)) // s.drift
    topics = _zipf(uniform(hash_words(s.seed, 5, users, slots, eras)), s.topics, s.zipf)
    episodes = _episodes(s, users, slots, eras, topics, field[2] < s.abandon)
    noise = field[3] < s.noise
    popular = _zipf(uniform(hash_words(s.seed, 6, users[noise], positions[noise])), s.num_items, max(s.zipf, 1.1))
    episodes[noise] = scatter(popular, s.num_items, 2)
    liking = hash_words(s.seed, 7, users, positions)
    return Events(
        users=users,
        items=scatter(episodes, s.num_items, 1),
        times=times,
        likes=(uniform(liking) < np.where(noise, 0.01, 0.05)).astype(np.int8),
        watch_seconds=(5.0 + 3.0 * np.exp(normal(mix64(liking)))).astype(np.int64),
    )


def _times(
    s: Synthetic, users: Int64Array, positions: Int64Array, starts: Int64Array, new_session: NDArray[np.bool_]
) -> Any:
    """Seconds: pauses of about half a minute within a session, of most of a day between sessions."""
    drawn = normal(hash_words(s.seed, 3, users, positions))
    gaps = np.where(new_session, 3600.0 + 50_000.0 * np.exp(0.9 * drawn), 1.0 + 25.0 * np.exp(0.8 * drawn))
    clock = np.cumsum(gaps.astype(np.int64))
    joined = (hash_words(s.seed, 8, users) % np.uint64(30 * 86400)).astype(np.int64)
    return _START + joined + clock - clock[starts]


def _interests(s: Synthetic, users: Int64Array, sessions: Int64Array, side: NDArray[np.bool_]) -> Any:
    """The interest (0..interests - 1) that each event continues: the session's main one, or its side one."""
    words = hash_words(s.seed, 9, users, sessions)
    main = _zipf(uniform(words), s.interests, 0.5)
    if s.interests == 1:
        return main
    other = (mix64(words) % np.uint64(s.interests - 1)).astype(np.int64)
    return np.where(side, (main + 1 + other) % s.interests, main)


def _episodes(
    s: Synthetic,
    users: Int64Array,
    slots: Int64Array,
    eras: Int64Array,
    topics: Int64Array,
    abandon: NDArray[np.bool_],
) -> Int64Array:
    """Index in the catalogue of each event: the next episode of its user in the series of the interest it continues."""
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
    entry = _zipf(uniform(hash_words(s.seed, 10, users[order], slots[order], eras[order])), size, s.zipf)
    index_in_catalogue = np.empty(len(key), np.int64)
    index_in_catalogue[order] = (offset + (entry[group] + series) % size) * s.episodes + left_off % s.episodes
    return index_in_catalogue


def scatter(indices: Int64Array, num: int, which: int) -> Int64Array:
    """A fixed bijection of 0..num - 1, so that neighbouring raw ids have nothing in common."""
    step = int(num * (0.6180339887 if which == 1 else 0.7548776662)) | 1
    while math.gcd(step, num) != 1:
        step += 2
    return (indices * step + 7919) % num


def user_blocks(settings: Synthetic, max_events: int = _BLOCK_EVENTS) -> list[tuple[int, int]]:
    """Cut the users into blocks (first, last + 1) of at most `max_events` events (or one user)."""
    with np.errstate(over="ignore"):
        lengths = user_lengths(settings, np.arange(settings.num_users, dtype=np.int64))
    return list(pairwise(cut_by_budget(offsets_of(lengths), max_events).tolist()))
