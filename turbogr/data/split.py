"""Split: which events train and which are held out, computed from the store and a rule.

Rules
    leave-one-out    the last event of every user is the test event; there is no validation
    leave-two-out    the last event is the test event, the one before it the validation event
    time:T           events before T train; a user's first event from T on is the test event
    time:V,T         events before V train; the first event in [V, T) is the validation event, the first from T on
                     the test event
A task that predicts what users do with items has all events from T on for its test (`Split.events`), and all in [V, T)
for validation, those of new users too.
T and V are ISO dates or times (UTC unless they say otherwise) or seconds. A held-out event always has at least one
event before it; all events of the user before it are its history.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turbogr.data.store import Store, read_range
from turbogr.data.times import iso_time, parse_time
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, did_you_mean

LEAVE_ONE_OUT = "leave-one-out"
LEAVE_TWO_OUT = "leave-two-out"

_FEW_USERS = 30
_ENOUGH_USERS = 300


@dataclass(frozen=True)
class Split:
    """Training events of user u are offsets[u]:train_end[u]; `valid` and `test` hold event indices, -1 for none.

    `bounds` has the first event of every user's training, validation and test events, and the end of the user's events.
    """

    rule: str
    train_end: Int64Array
    valid: Int64Array
    test: Int64Array
    bounds: tuple[Int64Array, Int64Array, Int64Array, Int64Array]

    @classmethod
    def of(cls, store: Store, rule: str | None = None) -> Split:
        """Split `store` by `rule`, by default the rule of its manifest.

        Raises:
            UserError: the rule is unknown, or cuts by time a store whose times are positions.
        """
        rule = parse_rule(store.manifest.split if rule is None else rule)
        starts, ends = np.asarray(store.offsets[:-1]), np.asarray(store.offsets[1:])
        none = np.full(store.num_users, -1, np.int64)
        if rule == LEAVE_ONE_OUT:
            held_out = ends - starts >= 2
            first = ends - held_out
            return cls(rule, first, none, np.where(held_out, ends - 1, -1), (starts, first, first, ends))
        if rule == LEAVE_TWO_OUT:
            tested, validated = ends - starts >= 2, ends - starts >= 3
            valid, test = np.where(validated, ends - 2, -1), np.where(tested, ends - 1, -1)
            bounds = (starts, ends - tested - validated, ends - tested, ends)
            return cls(rule, bounds[1], valid, test, bounds)
        if store.manifest.times != "real":
            raise UserError(f"split {rule!r} needs times, but {store.path} has only positions; use leave-one-out")
        cuts = [int(cut) for cut in rule.removeprefix("time:").split(",")]
        firsts = [_first_events(store, cut) for cut in cuts]
        test = np.where((firsts[-1] < ends) & (firsts[-1] > starts), firsts[-1], -1)
        if len(cuts) == 1:
            return cls(rule, firsts[0], none, test, (starts, firsts[0], firsts[0], ends))
        valid = np.where((firsts[0] < firsts[1]) & (firsts[0] > starts), firsts[0], -1)
        return cls(rule, firsts[0], valid, test, (starts, firsts[0], firsts[1], ends))

    def targets(self, part: str) -> Int64Array:
        """Return the held-out event of every user, int64 [U], -1 where there is none; part is "valid" or "test"."""
        if part not in ("valid", "test"):
            raise ValueError(f"part must be 'valid' or 'test', got {part!r}")
        return self.valid if part == "valid" else self.test

    def events(self, part: str) -> tuple[Int64Array, Int64Array]:
        """Return the range of every user's events in a part, "train", "valid" or "test": starts [U] and ends [U].

        After a cut in time these are all of the user's events there, also where the user has none before.
        """
        number = ("train", "valid", "test").index(part)
        return self.bounds[number], self.bounds[number + 1]

    def describe(self) -> str:
        """Say in one sentence what is held out, for the protocol line beside every metric."""
        tested, validated = (_users(int((events >= 0).sum())) for events in (self.test, self.valid))
        if self.rule == LEAVE_ONE_OUT:
            return f"leave-one-out: the last item of {tested} is held out; no validation item"
        if self.rule == LEAVE_TWO_OUT:
            return (
                f"leave-two-out: the last item of {tested} is the test item, "
                f"the one before it the validation item ({validated})"
            )
        cuts = [iso_time(int(cut)) for cut in self.rule.removeprefix("time:").split(",")]
        text = f"time cut: events before {cuts[0]} train; the first item from {cuts[-1]} on is held out ({tested})"
        if len(cuts) == 2:
            text += f", the first between the two is the validation item ({validated})"
        return text

    def few_users(self) -> str | None:
        """Say how little the metrics mean if few users have a held-out item; None where there are enough or none."""
        count = int((self.test >= 0).sum())
        if not 0 < count < _ENOUGH_USERS:
            return None
        if count < _FEW_USERS:
            have = "has" if count == 1 else "have"
            said = f"only {_users(count)} {have} a test item, so metrics mean nothing"
            return f"{said}: one user is {1 / count:.0%} of HR@10"
        interval = 1.96 * 0.5 / count**0.5
        return (
            f"only {_users(count)} have a test item: HR@10 is uncertain by up to ±{interval:.2f} (95 %), so small "
            "differences mean nothing"
        )


def _users(count: int) -> str:
    return f"{count:,} user" if count == 1 else f"{count:,} users"


@dataclass(frozen=True)
class Leak:
    """How much of the future a split lets training see.

    `later_share` is the share of training events that happen after a held-out event, averaged over the held-out
    events; `late_time` is a time before which nine tenths of all events lie, a sensible time for a cut.
    """

    later_share: float
    late_time: int


def future_leak(store: Store, split: Split) -> Leak | None:
    """Measure the leak of a split; None where the store has no real times or nothing is held out."""
    if store.manifest.times != "real" or not (split.test >= 0).any():
        return None
    low, high = time_range(store)
    width = max((high - low) // _TIME_BINS + 1, 1)
    all_counts = np.zeros(_TIME_BINS + 1, np.int64)
    train_counts, test_counts = np.zeros_like(all_counts), np.zeros_like(all_counts)
    for first, last in store.user_blocks():
        start, stop = int(store.offsets[first]), int(store.offsets[last])
        bins = (read_range(store.times, start, stop) - low) // width
        lengths = np.diff(store.offsets[first : last + 1])
        training = np.arange(start, stop) < np.repeat(split.train_end[first:last], lengths)
        test = split.test[first:last]
        all_counts += np.bincount(bins, minlength=len(all_counts))
        train_counts += np.bincount(bins[training], minlength=len(all_counts))
        test_counts += np.bincount(bins[test[test >= 0] - start], minlength=len(all_counts))
    later = train_counts.sum() - np.cumsum(train_counts)
    share = (later @ test_counts) / (test_counts.sum() * max(int(train_counts.sum()), 1))
    late_time = low + width * int(np.searchsorted(np.cumsum(all_counts), 0.9 * all_counts.sum()))
    midnight = late_time - late_time % 86400
    return Leak(float(share), midnight if midnight > low else late_time)


_TIME_BINS = 1 << 14


def time_range(store: Store) -> tuple[int, int]:
    """Return the first and the last time of a store."""
    ranges = []
    for first, last in store.user_blocks():
        times = read_range(store.times, int(store.offsets[first]), int(store.offsets[last]))
        if len(times):
            ranges.append((int(times.min()), int(times.max())))
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _first_events(store: Store, cut: int) -> Int64Array:
    """Return the index of every user's first event at or after `cut` (the user's end where there is none)."""
    firsts = np.empty(store.num_users, np.int64)
    for first, last in store.user_blocks():
        start, stop = int(store.offsets[first]), int(store.offsets[last])
        before = np.zeros(stop - start + 1, np.int64)
        np.cumsum(read_range(store.times, start, stop) < cut, out=before[1:])
        bounds = np.asarray(store.offsets[first : last + 1]) - start
        firsts[first:last] = np.asarray(store.offsets[first:last]) + np.diff(before[bounds])
    return firsts


def parse_rule(rule: str) -> str:
    """Return the rule in its canonical form, times in seconds.

    Raises:
        UserError: the rule is unknown or a time cannot be read.
    """
    if rule in (LEAVE_ONE_OUT, LEAVE_TWO_OUT):
        return rule
    if not rule.startswith("time:"):
        hint = did_you_mean(rule, [LEAVE_ONE_OUT, LEAVE_TWO_OUT, "time:"])
        raise UserError(f"unknown split {rule!r}: use leave-one-out, leave-two-out or time:2022-05-01.{hint}")
    cuts = [_parse_cut(text, rule) for text in rule.removeprefix("time:").split(",")]
    if len(cuts) > 2 or cuts != sorted(set(cuts)):
        raise UserError(f"split {rule!r}: give one cut, or two in ascending order (validation, test)")
    return "time:" + ",".join(str(cut) for cut in cuts)


def _parse_cut(text: str, rule: str) -> int:
    cut = parse_time(text)
    if cut is None:
        raise UserError(
            f"split {rule!r}: cannot read {text.strip()!r} as a time; write 2022-05-01, 2022-05-01T12:00:00 or seconds"
        )
    return cut
