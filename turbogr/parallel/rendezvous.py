"""The ranks of a job wait for each other at the start, so that missing ranks can be named.

When torchrun restarts a job, the store still holds the addresses of the previous attempt, and no environment variable
tells attempts apart on all machines: an agent whose own ranks did not fail does not count the restart. So the ranks
agree on an id for this attempt. Each rank writes an id of its own that is never used again. Rank 0 publishes the list
of the ids it finds, and again when one of them changes, until every rank has confirmed the same list.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed.distributed_c10d import Store

from turbogr.errors import UserError

_POLL_SECONDS = 0.05


def wait_for_ranks(store: Store, rank: int, size: int, seconds: float) -> str:
    """Wait for all ranks; return an id of this attempt, the same on all.

    Raises:
        UserError: ranks did not connect within `seconds`; it names them.
    """
    own = uuid.uuid4().hex
    store.set(_id_key(rank), own)
    deadline = time.monotonic() + seconds
    listed: list[str] = []
    attempt = ""
    while True:
        if rank == 0:
            present = _present(store, size)
            if None not in present and present != listed:
                listed, attempt = [entry for entry in present if entry is not None], uuid.uuid4().hex
                store.set("list", json.dumps([attempt, listed]))
        elif store.check(["list"]):
            attempt, listed = json.loads(store.get("list"))
        if listed and listed[rank] == own:
            store.set(_confirm_key(attempt, rank), "here")
            if store.check([_confirm_key(attempt, number) for number in range(size)]):
                return attempt
        if time.monotonic() > deadline:
            raise UserError(_missing_ranks(store, size, seconds, attempt))
        time.sleep(_POLL_SECONDS)


def _id_key(rank: int) -> str:
    return f"id-{rank}"


def _confirm_key(attempt: str, rank: int) -> str:
    return f"{attempt}-confirmed-{rank}"


def _present(store: Store, size: int) -> list[str | None]:
    """Return the latest id of each rank, None for a rank that has written none."""
    keys = [_id_key(rank) for rank in range(size)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _missing_ranks(store: Store, size: int, seconds: float, attempt: str) -> str:
    keys = [_confirm_key(attempt, rank) if attempt else _id_key(rank) for rank in range(size)]
    missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
    return (
        f"rank {missing or 'none'} of {size} did not connect within {seconds:g} s; check that every rank was started, "
        "and read what the missing ones printed"
    )
