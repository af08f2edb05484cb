"""A fixed sample of users, on which an evaluation is measured where all users would take too long.

Whether a user comes before another is a function of the seed and their raw ids alone. The sample is therefore the same
on any number of ranks, for the model and for every baseline, in every run with this seed, and in another store of the
same users.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.metrics import margin
from turbogr.random import GOLDEN64, derive_seed, mix64


@dataclass(frozen=True)
class UserSample:
    """The `num_users` users whose ids have the smallest hashes under `seed`."""

    num_users: int
    seed: int = 0

    def choose(self, store: Store, users: Int64Array) -> Int64Array:
        """Return which of `users` [n], rows of the store, are part of the sample: ascending indices into `users`."""
        if len(users) <= self.num_users:
            return np.arange(len(users))
        order = np.argsort(_hashes(store.user_ids.decode(users), self.seed), kind="stable")
        return np.sort(order[: self.num_users])

    def describe(self, num_all: int) -> str:
        """Return what a protocol says of the sample; nothing where it has all `num_all` users.

        The interval is the widest that the mean of values between 0 and 1 can have, so it is the same for all methods.
        """
        if self.num_users >= num_all:
            return ""
        text = f"a sample of {self.num_users:,} of the {num_all:,} users, drawn by their ids with seed {self.seed}"
        if self.num_users < 2:
            return text
        widest = margin(0.5 / (self.num_users - 1) ** 0.5, self.num_users)
        return f"{text}, whose 95 % interval is at most ± {widest:.4f}"


def _hashes(ids: NDArray[np.generic], seed: int) -> NDArray[np.uint64]:
    """Return a 64-bit word for every raw id, an integer or a text."""
    if ids.dtype == object:
        words = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in ids)
        keys = np.frombuffer(b"".join(words), "<u8").astype(np.uint64)
    else:
        keys = ids.astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        found: NDArray[np.uint64] = mix64(mix64(keys * np.uint64(GOLDEN64)) ^ np.uint64(derive_seed(seed, 0x5A4D)))
    return found
