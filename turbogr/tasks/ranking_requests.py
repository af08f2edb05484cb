"""What a ranking model is asked to predict: candidates for a user at a time, after a history.

Histories of every event and of requests follow one rule, so that a prediction depends on the user's events alone,
never on what else is asked for: a query behind e events sees those from `window_start(e)` on, which are all of them, or
at least the last half of `max_len`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turbogr.data.batching import Batch
from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.feature_values import FeatureValues, action_values, feature_values, token_features, user_features
from turbogr.data.ranges import concatenated_ranges, cut_by_budget, offsets_of
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.jagged import Jagged


@dataclasses.dataclass(frozen=True)
class RankingRequests:
    """R requests. `users` [R] are rows of the store, -1 for a user that it does not have. The history of a request is
    the user's events before event `ends` [R] of the store, and `times` [R] is when it is made.

    `items` has the candidates' item rows, Jagged of R rows and n values. `events` [n] are stored events whose features
    the candidates have; without them, `event_features` has values by the store's key, such as "event.tab", as the
    store's column has them (the number of a category, -1 for none; a number, NaN for none). Other keys are not given.
    """

    users: Int64Array
    ends: Int64Array
    times: Int64Array
    items: Jagged
    events: Int64Array | None = None
    event_features: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.users)


@dataclasses.dataclass(frozen=True)
class QueryBatch:
    """A batch of which some tokens are history and some are queries, as `ranking_layout` takes them."""

    batch: Batch
    is_history: torch.Tensor
    is_query: torch.Tensor
    sees: torch.Tensor


@dataclasses.dataclass(frozen=True)
class EventBlocks:
    """Consecutive events of users to be predicted together: those from `firsts` [n] until before `lasts` [n].

    Their history begins with event `starts` [n].
    """

    users: Int64Array
    starts: Int64Array
    firsts: Int64Array
    lasts: Int64Array

    @classmethod
    def of(cls, store: Store, starts: Int64Array, ends: Int64Array, max_len: int) -> EventBlocks:
        """Cut every user's events starts[u]:ends[u] into blocks with a common history."""
        half = max(1, max_len // 2)
        users = np.flatnonzero(ends > starts)
        origin = np.asarray(store.offsets)[users]
        low, high = (starts[users] - origin) // half, (ends[users] - 1 - origin) // half
        counts = high - low + 1
        number = concatenated_ranges(low, counts)
        origin, owner = np.repeat(origin, counts), np.repeat(users, counts)
        firsts = np.maximum(origin + number * half, np.repeat(starts[users], counts))
        lasts = np.minimum(origin + (number + 1) * half, np.repeat(ends[users], counts))
        return cls(owner, origin + np.maximum(number - 1, 0) * half, firsts, lasts)

    def batches(self, budget: int) -> list[slice]:
        """Cut the blocks, in order, into batches of at most `budget` events, histories included."""
        bounds = cut_by_budget(offsets_of(self.lasts - self.starts), budget)
        return [slice(first, last) for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def window_start(ends: Int64Array, max_len: int) -> Int64Array:
    """Return the number of the first event that a query behind `ends` events of a user sees."""
    half = max(1, max_len // 2)
    return np.maximum(ends // half - 1, 0) * half


def request_batch(
    store: Store, requests: RankingRequests, chosen: slice, columns: Mapping[str, str], max_len: int, delay: int = 0
) -> QueryBatch:
    """Read the histories and candidates of some requests; candidates follow the history of their request."""
    users, ends = requests.users[chosen], requests.ends[chosen]
    known = users >= 0
    origin = np.where(known, np.asarray(store.offsets)[np.maximum(users, 0)], 0)
    behind = np.where(known, ends - origin, 0)
    starts = origin + window_start(behind, max_len)
    lengths = np.where(known, ends - starts, 0)
    offsets = requests.items.offsets.numpy()
    numbers = np.diff(offsets[chosen.start : chosen.stop + 1])
    of_candidates = slice(int(offsets[chosen.start]), int(offsets[chosen.stop]))
    # Tokens by request: first its history, then its candidates.
    total = lengths + numbers
    at = offsets_of(total)
    is_history = np.zeros(int(at[-1]), bool)
    is_history[concatenated_ranges(at[:-1], lengths)] = True
    events = np.full(len(is_history), -1, np.int64)
    events[is_history] = concatenated_ranges(starts, lengths)
    stored = None if requests.events is None else requests.events[of_candidates]
    items = np.empty(len(is_history), np.int64)
    items[is_history] = store.items[events[is_history]]
    items[~is_history] = requests.items.values[of_candidates].numpy()
    times = np.empty(len(is_history), np.int64)
    times[is_history] = store.times[events[is_history]]
    times[~is_history] = np.repeat(requests.times[chosen], numbers)
    shown = events.copy()
    if stored is not None:
        shown[~is_history] = stored
    given = {key: values[of_candidates] for key, values in requests.event_features.items()}
    features = _features(store, columns, items, shown, is_history, given)
    # Only what was known at the time of the request is seen.
    row = np.repeat(np.arange(len(users)), total)
    before = is_history & (times < np.repeat(requests.times[chosen] - delay, total))
    sees = np.bincount(row[before], minlength=len(users))[row]
    tensor = torch.from_numpy(times)
    batch = Batch(
        users=torch.from_numpy(np.array(users, np.int64)),
        items=Jagged.from_lengths(torch.from_numpy(items), torch.from_numpy(total)),
        events=torch.from_numpy(events),
        times=tensor,
        next_times=tensor,
        targets=None,
        features=features,
        user_features=user_features(store, columns, users),
        actions=_actions(store, columns, events, is_history),
    )
    history = torch.from_numpy(is_history)
    return QueryBatch(batch, history, ~history, torch.from_numpy(sees))


def _actions(
    store: Store, columns: Mapping[str, str], events: Int64Array, is_history: NDArray[np.bool_]
) -> dict[str, torch.Tensor]:
    found = action_values(store, columns, np.maximum(events, 0))
    unknown = torch.from_numpy(~is_history)
    return {name: values.masked_fill(unknown, torch.nan) for name, values in found.items()}


def _features(
    store: Store,
    columns: Mapping[str, str],
    items: Int64Array,
    events: Int64Array,
    is_history: NDArray[np.bool_],
    given: Mapping[str, NDArray[Any]],
) -> dict[str, FeatureValues]:
    """Return the features of tokens; those of candidates that are no stored events are `given`, or missing."""
    stored = {name: key for name, key in columns.items() if key in store.features}
    found = token_features(store, stored, items, events)
    kept = token_features(
        store, {name: key for name, key in columns.items() if key not in store.features}, items, np.maximum(events, 0)
    )
    unknown = torch.from_numpy(events < 0)
    found |= {name: _masked(values, unknown) for name, values in kept.items()}
    for name, key in stored.items():
        if key in given and name in found:
            found[name] = _with_given(store.features[key], found[name], events, is_history, given[key])
    return found


def _masked(values: FeatureValues, unknown: torch.Tensor) -> FeatureValues:
    assert isinstance(values, torch.Tensor)
    return values.masked_fill(unknown, 0)


def _with_given(
    column: FeatureColumn,
    values: FeatureValues,
    events: Int64Array,
    is_history: NDArray[np.bool_],
    given: NDArray[Any],
) -> FeatureValues:
    """Return the values of a feature with those of the candidates replaced by `given` ones."""
    assert isinstance(values, torch.Tensor), "several categories of an event are not given with a request"
    own = dataclasses.replace(column, values=np.asarray(given))
    replaced = feature_values(own, np.arange(len(given)))
    assert isinstance(replaced, torch.Tensor)
    changed = values.clone()
    changed[torch.from_numpy(~is_history)] = replaced.to(changed.dtype)
    return changed
