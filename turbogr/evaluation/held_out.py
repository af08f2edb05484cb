"""The held-out events of one part of a split, on which models and baselines are measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from turbogr.data.ranges import concatenated_ranges, cut_by_budget, offsets_of
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError
from turbogr.evaluation.user_sample import UserSample


@dataclass(frozen=True)
class HeldOut:
    """n users with one held-out event each, in store order.

    `users` [n] rows of the store, `starts` [n] their first events, `events` [n] the held-out ones; the history of a
    held-out event is starts[i]:events[i] and never empty. `skipped` counts the store's other users, by reason.
    The items of a history's newest `filter_last` events are not candidates; None: of all events.
    """

    store: Store
    part: str
    users: Int64Array
    starts: Int64Array
    events: Int64Array
    skipped: dict[str, int]
    filter_last: int | None = None

    @classmethod
    def of(
        cls,
        store: Store,
        split: Split,
        part: str,
        *,
        filter_last: int | None = None,
        sample: UserSample | None = None,
    ) -> HeldOut:
        """Collect the held-out events of `part` ("valid" or "test"), of all users or of those of a `sample`.

        Raises:
            UserError: the split holds nothing out for this part.
        """
        events = split.targets(part)
        users = np.flatnonzero(events >= 0)
        if not len(users):
            raise UserError(
                f"the split {split.rule!r} of {store.path} has no {part} event for any user; "
                + ("evaluate the test part" if part == "valid" else "use another split, or a log with longer histories")
            )
        starts = np.asarray(store.offsets)[users]
        assert (events[users] > starts).all(), "a held-out event needs a history"
        missing = store.num_users - len(users)
        skipped = {f"no {part} event": missing} if missing else {}
        found = cls(store, part, users, starts, events[users], skipped, filter_last)
        if sample is None or sample.num_users >= len(users):
            return found
        return found._only(sample.choose(store, users), "not in the sample")

    def sample(self, most: int, seed: int = 0) -> HeldOut:
        """Return at most `most` of the users, drawn by `seed`, in store order; the others count as skipped."""
        if len(self) <= most:
            return self
        return self._only(np.sort(np.random.default_rng(seed).choice(len(self), most, replace=False)), "not drawn")

    def _only(self, chosen: Int64Array, reason: str) -> HeldOut:
        users, starts, events = (column[chosen] for column in (self.users, self.starts, self.events))
        skipped = {**self.skipped, reason: len(self) - len(chosen)}
        return dataclasses.replace(self, users=users, starts=starts, events=events, skipped=skipped)

    def __len__(self) -> int:
        return len(self.users)

    @property
    def targets(self) -> Int64Array:
        """Item rows of the held-out events, [n]."""
        return self.store.items[self.events].astype(np.int64)

    def seen(self, first: int, last: int) -> tuple[Int64Array, Int64Array]:
        """Return the item rows that are not candidates for users first..last - 1, and how many each user has."""
        events = self.events[first:last]
        lengths = events - self.starts[first:last]
        if self.filter_last is not None:
            # No history is longer than the store, and NumPy accepts no integer beyond int64.
            lengths = np.minimum(lengths, min(self.filter_last, len(self.store.items)))
        return self.store.items[concatenated_ranges(events - lengths, lengths)].astype(np.int64), lengths

    def blocks(self, max_events: int) -> list[tuple[int, int]]:
        """Cut the users into ranges (first, last + 1) that have at most `max_events` past events (or one user)."""
        return list(pairwise(cut_by_budget(offsets_of(self.events - self.starts), max_events).tolist()))
