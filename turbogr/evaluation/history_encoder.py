"""A trained model as an encoder of histories, which is all that evaluation and recommendation use of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from turbogr.data.batching import Batch, history_batch, plan_batches
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.item_ranking import TILE, ItemVectors

ENCODE_TOKENS = 1 << 13  # most tokens encoded at once: bounds the memory of a tile of long histories


class Encoder(ItemVectors, Protocol):
    """A trained model as user and item vectors; the score of an item for a user is their dot product."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The store's column behind every feature that its batches carry, by the feature's name."""
        ...

    def encode_last(self, batch: Batch) -> Tensor:
        """Return the unit vector of the last position of every sequence, [B, d]; no sequence may be empty."""
        ...


def encode_histories(
    encoder: Encoder,
    store: Store,
    users: Int64Array,
    ends: Int64Array,
    max_len: int,
    *,
    request_times: Int64Array | None = None,
    step: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the vectors [n, d] of `users` [n], each from its last `max_len` events before event `ends` [n].

    Users are encoded TILE at a time, a tile of long histories in several pieces, so a user's vector depends on its tile
    alone, to the last digit. `request_times` as in `history_batch`; `step` is called with the number of users done, and
    may raise to stop.
    """
    lengths = np.minimum(ends - np.asarray(store.offsets)[users], max_len)
    vectors = []
    for chosen in pieces(lengths):
        times = None if request_times is None else request_times[chosen]
        batch = history_batch(store, users[chosen], ends[chosen], max_len, request_times=times, columns=encoder.columns)
        vectors.append(encoder.encode_last(batch))
        if step is not None:
            step(len(chosen))
    return torch.cat(vectors)


def pieces(lengths: Int64Array) -> list[Int64Array]:
    """Cut sequences 0..n - 1 with `lengths` [n] into tiles, and tiles of more than ENCODE_TOKENS tokens further."""
    return [
        first + piece
        for first in range(0, len(lengths), TILE)
        for piece in plan_batches(lengths[first : first + TILE], batch_tokens=ENCODE_TOKENS, shuffle=False)
    ]


def batches_of(num_users: int, batch_size: int) -> list[slice]:
    """Cut 0..num_users - 1 into ranges of `batch_size` rounded up to whole tiles."""
    size = -(-batch_size // TILE) * TILE
    return [slice(first, min(first + size, num_users)) for first in range(0, num_users, size)]


def num_workers_of(encoder: Encoder) -> int:
    """Return how many threads may use the encoder at once: all of PyTorch's on the CPU, one beside an accelerator."""
    on_cpu = encoder.item_rows(0, min(1, encoder.num_items)).device.type == "cpu"
    return torch.get_num_threads() if on_cpu else 1
