"""What evaluation and recommendation ask of a recommender: the scores of all items for some histories.

A trained model is one (`ModelScorer`); simple methods and weighted sums of several are others. All are ranked by the
same code, so their metrics follow the same protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turbogr.data.batching import Batch, plan_batches
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.item_ranking import TILE, ItemVectors, Scores, VectorScores, held_queries
from turbogr.evaluation.user_histories import UserHistories

ENCODE_TOKENS = 1 << 13  # most tokens encoded at once: bounds the memory of a tile of long histories

Step = Callable[[int], None]  # called with the number of users done; it raises to stop


class Scorer(Protocol):
    """Scores items for histories, TILE histories at a time: a score depends on the histories of its tile alone."""

    @property
    def num_items(self) -> int: ...

    @property
    def num_workers(self) -> int:
        """How many threads may use it at once."""
        ...

    @property
    def batch_size(self) -> int:
        """How many users one call of `score` should get, a multiple of TILE."""
        ...

    def score(self, histories: UserHistories, step: Step) -> Scores:
        """Return the scores of all items for every history; `step` is called with the number of users done."""
        ...


class Encoder(ItemVectors, Protocol):
    """A trained model as user and item vectors; the score of an item for a user is their dot product."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The store's column behind every feature that its batches carry, by the feature's name."""
        ...

    def encode_last(self, batch: Batch) -> Tensor:
        """Return the unit vector of the last position of every sequence, [B, d]; no sequence may be empty."""
        ...


@dataclass(frozen=True)
class ModelScorer:
    """A trained model that reads the newest `max_len` events of a history."""

    encoder: Encoder
    max_len: int

    @property
    def num_items(self) -> int:
        return self.encoder.num_items

    @property
    def num_workers(self) -> int:
        """All of PyTorch's threads on the CPU, one beside an accelerator."""
        on_cpu = self.encoder.item_rows(0, min(1, self.num_items)).device.type == "cpu"
        return torch.get_num_threads() if on_cpu else 1

    @property
    def batch_size(self) -> int:
        return held_queries(self.num_items)

    def encode(self, histories: UserHistories, step: Step) -> Tensor:
        """Return the vectors [n, d] of the histories.

        They are encoded TILE at a time, a tile of long histories in several pieces, so a vector depends on its tile
        alone, to the last digit.
        """
        vectors = []
        for chosen in pieces(histories.lengths.clip(max=self.max_len)):
            vectors.append(self.encoder.encode_last(histories.batch(chosen, self.max_len, self.encoder.columns)))
            step(len(chosen))
        return torch.cat(vectors)

    def score(self, histories: UserHistories, step: Step) -> Scores:
        return VectorScores(self.encode(histories, step), _StoppableItems(self.encoder, step))


@dataclass(frozen=True)
class _StoppableItems:
    """`ItemVectors` that call `step` before every chunk, so that a long pass over a large catalogue can be stopped."""

    items: ItemVectors
    step: Step

    @property
    def num_items(self) -> int:
        return self.items.num_items

    def item_rows(self, start: int, stop: int) -> Tensor:
        self.step(0)
        return self.items.item_rows(start, stop)


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


def no_step(num_users: int) -> None:
    """A `Step` that goes on."""
