"""Batches: which sequences come together (pure functions over arrays) and the tensors of one batch.

The plan of an epoch is a function of (lengths, seed, epoch) alone: the shuffle sorts the sequences by a hash, so no
generator and no state is involved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.data.feature_values import FeatureValues, action_values, select, token_features, user_features
from turbogr.data.ranges import concatenated_ranges, cut_by_budget, offsets_of
from turbogr.data.repeats import RepeatedEvents
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError
from turbogr.jagged import Jagged
from turbogr.random import GOLDEN64, mix64

_EVENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Batch:
    """B sequences with T input events together; all int64, but for features and actions that are numbers.

    Position p of a sequence predicts `targets[p]`, which happens at `next_times[p]`.

    Attributes:
        users: [B], the user's row in the store.
        items: Jagged of item rows, values [T].
        events: [T], the index of every input event in the store, a stable name of the token.
        times: [T], seconds.
        next_times: [T], the time of the event to be predicted; at the last position of a request, the request's time.
        targets: [T] item rows to be predicted, None when they are unknown.
        trained: the positions, ascending, whose targets count in the loss; None when all do.
        step_lengths: lengths of all sequences of the step, on the CPU, where this batch is only one rank's part of it.
        step_targets: the targets of all of them, in the order of the whole step.
        step_num_trained: the number of targets that count on all ranks together, where this batch is one rank's part.
        negatives: what was drawn for this batch ahead of its step, in host memory; None when nothing was.
        features: values of the tokens' features by the feature's name, of T rows (see `FeatureValues`); row 0 of a
            feature's table means that the value is not given. Those of items are of `items`.
        user_features: values of the users' features, of B rows.
        actions: [T] float32 by name, what the user did in the input events; NaN where it is not known.
        on_host: where this batch is on an accelerator, the same one in host memory.
    """

    users: Tensor
    items: Jagged
    events: Tensor
    times: Tensor
    next_times: Tensor
    targets: Tensor | None
    trained: Tensor | None = None
    step_lengths: Tensor | None = None
    step_targets: Tensor | None = None
    step_num_trained: int | None = None
    negatives: Tensor | None = None
    features: Mapping[str, FeatureValues] = field(default_factory=dict)
    user_features: Mapping[str, FeatureValues] = field(default_factory=dict)
    actions: Mapping[str, Tensor] = field(default_factory=dict)
    on_host: Batch | None = None

    @property
    def at_hand(self) -> Batch:
        """This batch in host memory, for what is computed from ids alone."""
        return self if self.on_host is None else self.on_host

    @property
    def lengths_of_step(self) -> Tensor:
        """Lengths of the sequences that all ranks together train on."""
        return self.items.lengths if self.step_lengths is None else self.step_lengths

    @property
    def targets_of_step(self) -> Tensor:
        """Targets of all ranks together."""
        targets = self.targets if self.step_targets is None else self.step_targets
        assert targets is not None
        return targets

    @property
    def num_trained_of_step(self) -> int:
        """Targets that count in the loss, of all ranks together."""
        if self.step_num_trained is not None:
            return self.step_num_trained
        return int(self.lengths_of_step.sum()) if self.trained is None else self.trained.numel()

    def at_trained(self) -> Batch:
        """Return the positions that are trained on as a batch of their own; the step's targets stay all of them."""
        if self.trained is None:
            return self
        chosen = self.trained
        return dataclasses.replace(
            self,
            items=Jagged(self.items.values[chosen], torch.searchsorted(chosen, self.items.offsets)),
            events=self.events[chosen],
            times=self.times[chosen],
            next_times=self.next_times[chosen],
            targets=None if self.targets is None else self.targets[chosen],
            features={name: select(values, chosen) for name, values in self.features.items()},
            actions={name: values[chosen] for name, values in self.actions.items()},
            step_targets=None if self.targets is None else self.targets_of_step,
            step_num_trained=self.num_trained_of_step,
            trained=None,
            on_host=None if self.on_host is None else self.on_host.at_trained(),
        )

    @property
    def num_sequences(self) -> int:
        return self.items.num_rows

    @property
    def num_tokens(self) -> int:
        return self.items.num_values

    @property
    def last_positions(self) -> Tensor:
        """Index of the last token of every sequence, [B] int64; sequences must not be empty."""
        return self.items.offsets[1:] - 1

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy in memory from which an accelerator can read while the host goes on."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(values: FeatureValues) -> FeatureValues:
            if isinstance(values, Tensor):
                return change(values)
            return Jagged(change(values.values), change(values.offsets))

        return Batch(
            users=change(self.users),
            items=Jagged(change(self.items.values), change(self.items.offsets)),
            events=change(self.events),
            times=change(self.times),
            next_times=change(self.next_times),
            targets=None if self.targets is None else change(self.targets),
            trained=None if self.trained is None else change(self.trained),
            step_lengths=self.step_lengths,
            step_targets=None if self.step_targets is None else change(self.step_targets),
            step_num_trained=self.step_num_trained,
            negatives=None if self.negatives is None else change(self.negatives),
            features={name: changed(values) for name, values in self.features.items()},
            user_features={name: changed(values) for name, values in self.user_features.items()},
            actions={name: change(values) for name, values in self.actions.items()},
            on_host=self.on_host,
        )


@dataclass(frozen=True)
class Sequences:
    """Training sequences: inputs starts[i]:starts[i] + lengths[i] of the store, each predicting the next event.

    With `every_event`, all training events are inputs and none has a target, as the task predicts their own actions.
    `num_events_cut` counts the inputs that no sequence covers because their users are longer than `max_len`.
    """

    users: Int64Array
    starts: Int64Array
    lengths: Int64Array
    num_events_cut: int
    every_event: bool = False

    def __len__(self) -> int:
        return len(self.users)

    def count_targets(self, repeated: RepeatedEvents) -> Int64Array:
        """Return how many targets of every sequence are not repeats, [n] int64."""
        counts = np.empty(len(self), np.int64)
        for first, last in pairwise(cut_by_budget(offsets_of(self.lengths), _EVENTS_AT_ONCE).tolist()):
            lengths = self.lengths[first:last]
            kept = ~repeated.of(concatenated_ranges(self.starts[first:last] + 1, lengths))
            counts[first:last] = np.add.reduceat(kept, offsets_of(lengths)[:-1], dtype=np.int64)
        return counts

    def at(self, chosen: NDArray[np.bool_]) -> Sequences:
        """Return the sequences that are `chosen` [n]."""
        return Sequences(
            self.users[chosen], self.starts[chosen], self.lengths[chosen], self.num_events_cut, self.every_event
        )


def training_sequences(
    starts: Int64Array, ends: Int64Array, max_len: int, window: str = "last", *, every_event: bool = False
) -> Sequences:
    """Cut the training events starts[u]:ends[u] of every user into sequences of at most `max_len` inputs.

    n events give n - 1 inputs, as the last one is only a target; users with fewer than 2 events give nothing. With
    `every_event` they give n inputs. "last" keeps the last `max_len` inputs; "split" covers all inputs with consecutive
    windows, the latest of them full.
    """
    if max_len < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
    if window not in ("last", "split"):
        raise ValueError(f"window must be 'last' or 'split', got {window!r}")
    inputs = np.maximum(ends - starts - (not every_event), 0)
    users = np.flatnonzero(inputs)
    starts, inputs = starts[users], inputs[users]
    if window == "last":
        lengths = np.minimum(inputs, max_len)
        return Sequences(users, starts + inputs - lengths, lengths, int((inputs - lengths).sum()), every_event)
    windows = -(-inputs // max_len)
    back = np.repeat(windows, windows) - 1 - concatenated_ranges(np.zeros_like(windows), windows)
    stops = np.repeat(starts + inputs, windows) - back * max_len
    firsts = np.maximum(np.repeat(starts, windows), stops - max_len)
    return Sequences(np.repeat(users, windows), firsts, stops - firsts, 0, every_event)


def shuffled_order(num: int, seed: int, epoch: int) -> Int64Array:
    """Return a permutation of 0..num - 1 that depends on (num, seed, epoch) alone: the order of a 64-bit hash."""
    key = mix64(mix64((seed + GOLDEN64) % 2**64) ^ (epoch % 2**64))
    hashes = mix64(np.arange(num, dtype=np.uint64) * np.uint64(GOLDEN64) + np.uint64(key))
    return np.argsort(hashes, kind="stable")


def plan_batches(
    lengths: Int64Array,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> list[Int64Array]:
    """Group sequences 0..n - 1 with `lengths` [n] into batches; every sequence comes exactly once.

    Exactly one of `batch_size` (sequences per batch) and `batch_tokens` is given; no batch holds more than
    `batch_tokens` tokens unless a single sequence does. Returns the sequences of every batch in order.
    """
    order = shuffled_order(len(lengths), seed, epoch) if shuffle else np.arange(len(lengths), dtype=np.int64)
    bounds = batch_bounds(np.asarray(lengths, np.int64)[order], batch_size=batch_size, batch_tokens=batch_tokens)
    return [order[first:last] for first, last in pairwise(bounds.tolist())]


def batch_bounds(lengths: Int64Array, *, batch_size: int | None = None, batch_tokens: int | None = None) -> Int64Array:
    """Cut sequences with `lengths` [n], in their order, into batches: batch k is bounds[k]:bounds[k + 1].

    Exactly one of `batch_size` (sequences per batch) and `batch_tokens` is given; no batch holds more than
    `batch_tokens` tokens unless a single sequence does.
    """
    if (batch_size is None) == (batch_tokens is None):
        raise ValueError("give exactly one of batch_size and batch_tokens")
    budget = batch_size if batch_size is not None else batch_tokens
    assert budget is not None
    if budget < 1:
        raise ValueError(f"batch_size and batch_tokens must be at least 1, got {budget}")
    if batch_size is not None:
        return np.append(np.arange(0, len(lengths), batch_size, dtype=np.int64), len(lengths))
    return cut_by_budget(offsets_of(lengths), budget)


def training_targets(store: Store, sequences: Sequences, chosen: Int64Array) -> Tensor:
    """Read the targets of the `chosen` sequences [B] alone, [T] int64."""
    return _tensor(store.items[concatenated_ranges(sequences.starts[chosen] + 1, sequences.lengths[chosen])])


def training_batch(
    store: Store,
    sequences: Sequences,
    chosen: Int64Array,
    columns: Mapping[str, str] | None = None,
    repeated: RepeatedEvents | None = None,
) -> Batch:
    """Read the `chosen` sequences [B] from the store, in that order, with the `columns` of its features by name.

    Targets that are `repeated` are not trained on; without it, all are.
    """
    lengths = sequences.lengths[chosen]
    events = concatenated_ranges(sequences.starts[chosen], lengths)
    if sequences.every_event:
        return event_batch(store, sequences.users[chosen], sequences.starts[chosen], lengths, columns)
    times, targets = store.times[events + 1], store.items[events + 1]
    batch = _read(store, sequences.users[chosen], lengths, events, times, targets, columns)
    if repeated is None:
        return batch
    trained = np.flatnonzero(~repeated.of(events + 1))
    return batch if len(trained) == len(events) else dataclasses.replace(batch, trained=_tensor(trained))


def event_batch(
    store: Store,
    users: Int64Array,
    starts: Int64Array,
    lengths: Int64Array,
    columns: Mapping[str, str] | None = None,
) -> Batch:
    """Read the events starts[b]:starts[b] + lengths[b] of users[b], each with its own actions and no target.

    `next_times` are the times of the events themselves, when their actions are asked for.
    """
    events = concatenated_ranges(starts, lengths)
    return _read(store, users, lengths, events, store.times[events], None, columns)


def history_batch(
    store: Store,
    users: Int64Array,
    ends: Int64Array,
    max_len: int,
    *,
    request_times: Int64Array | None = None,
    columns: Mapping[str, str] | None = None,
) -> Batch:
    """Read the last `max_len` events before event ends[b] of users[b], for evaluation and recommendation.

    Without `request_times`, ends[b] is the held-out event and its time is the last next_time; with them, ends[b] may
    be the end of the user's events, the last next_time is the request's, and `targets` is None. A user without
    events before `ends` gives an empty sequence.
    """
    firsts = np.asarray(store.offsets)[users]
    lengths = np.minimum(ends - firsts, max_len)
    assert (lengths >= 0).all(), "ends must not lie before the user's first event"
    events = concatenated_ranges(ends - lengths, lengths)
    if request_times is None:
        times, targets = store.times[events + 1], store.items[events + 1]
        return _read(store, users, lengths, events, times, targets, columns)
    following = np.minimum(events + 1, store.num_events - 1)
    next_times = np.asarray(store.times[following])
    some = lengths > 0
    next_times[np.cumsum(lengths)[some] - 1] = request_times[some]
    return _read(store, users, lengths, events, next_times, None, columns)


def _read(
    store: Store,
    users: Int64Array,
    lengths: Int64Array,
    events: Int64Array,
    next_times: Int64Array,
    targets: NDArray[np.integer[Any]] | None,
    columns: Mapping[str, str] | None,
) -> Batch:
    columns, items = columns or {}, np.asarray(store.items[events], np.int64)
    _check_items(store, items)
    if targets is not None:
        _check_items(store, targets)
    return Batch(
        users=_tensor(users),
        items=Jagged.from_lengths(_tensor(items), _tensor(lengths)),
        events=_tensor(events),
        times=_tensor(store.times[events]),
        next_times=_tensor(next_times),
        targets=None if targets is None else _tensor(targets),
        features=token_features(store, columns, items, events),
        user_features=user_features(store, columns, users),
        actions=action_values(store, columns, events),
    )


def _check_items(store: Store, items: NDArray[np.integer[Any]]) -> None:
    """Require rows of the catalogue; a damaged or hostile store is opened without a look at its columns."""
    if len(items) and not (items.min() >= 0 and items.max() < store.num_items):
        wrong = items[(items < 0) | (items >= store.num_items)][0]
        raise UserError(
            f"{store.path} is damaged: an event is of the item in row {wrong}, and there are rows 0 to "
            f"{store.num_items - 1}; compare it with what was written: turbogr inspect {store.path} --verify"
        )


def batch_from_histories(
    items: Sequence[Sequence[int]], times: Sequence[Sequence[int]], request_times: Sequence[int]
) -> Batch:
    """Build a batch from item rows and times of users who need not be in any store; `events` counts from 0.

    Raises:
        ValueError: the three lists do not match in length.
    """
    lengths = np.array([len(row) for row in items], np.int64)
    if len(times) != len(items) or len(request_times) != len(items) or [len(row) for row in times] != lengths.tolist():
        raise ValueError("items, times and request_times must describe the same histories")
    flat_items = np.array([item for row in items for item in row], np.int64)
    flat_times = np.array([time for row in times for time in row], np.int64)
    next_times = np.empty_like(flat_times)
    next_times[:-1] = flat_times[1:]
    some = lengths > 0
    next_times[np.cumsum(lengths)[some] - 1] = np.asarray(request_times, np.int64)[some]
    return Batch(
        users=torch.arange(len(items)),
        items=Jagged.from_lengths(_tensor(flat_items), _tensor(lengths)),
        events=torch.arange(len(flat_items)),
        times=_tensor(flat_times),
        next_times=_tensor(next_times),
        targets=None,
    )


def _tensor(array: NDArray[np.integer[Any]]) -> Tensor:
    """Copy into an int64 tensor that owns its memory (memory-mapped arrays are read-only)."""
    return torch.from_numpy(np.array(array, np.int64))
