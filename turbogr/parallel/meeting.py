"""How the ranks of a job find each other before any of them is needed, so that missing ones can be named.

A job that torchrun starts again meets the store of its last life, with addresses of ranks that are gone, and nothing in
the environment tells its lives apart on all machines: an agent whose own ranks were well does not count the restart.
So ranks agree on a name for this life. Each leaves a name of its own that never comes again; rank 0 calls the roll of
the names it finds, again when one of them changes, until every rank has answered the same call.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed.distributed_c10d import Store

from turbogr.errors import UserError

_POLL_SECONDS = 0.05


def meet(store: Store, rank: int, size: int, seconds: float, *, restarted: bool = False) -> tuple[str, bool]:
    """Wait until all ranks are here; return a name of this life and whether any rank is `restarted`, the same on all.

    Raises:
        UserError: ranks did not come within `seconds`; it names them.
    """
    own = uuid.uuid4().hex
    store.set(_hello(rank), json.dumps([own, restarted]))
    deadline = time.monotonic() + seconds
    called: list[list[object]] = []
    life = ""
    while True:
        if rank == 0:
            here = _present(store, size)
            if None not in here and here != called:
                called, life = [name for name in here if name is not None], uuid.uuid4().hex
                store.set("roll", json.dumps([life, called]))
        elif store.check(["roll"]):
            life, called = json.loads(store.get("roll"))
        if called and called[rank][0] == own:
            store.set(_answer(life, rank), "here")
            if store.check([_answer(life, number) for number in range(size)]):
                return life, any(bool(again) for _, again in called)
        if time.monotonic() > deadline:
            raise UserError(_who_is_missing(store, size, seconds, life))
        time.sleep(_POLL_SECONDS)


def _hello(rank: int) -> str:
    return f"hello-{rank}"


def _answer(life: str, rank: int) -> str:
    return f"{life}-answer-{rank}"


def _present(store: Store, size: int) -> list[list[object] | None]:
    """The name that each rank has left last, None for those that have left none."""
    names = [_hello(rank) for rank in range(size)]
    return [json.loads(store.get(name)) if store.check([name]) else None for name in names]


def _who_is_missing(store: Store, size: int, seconds: float, life: str) -> str:
    names = [_answer(life, rank) if life else _hello(rank) for rank in range(size)]
    missing = ", ".join(str(rank) for rank, name in enumerate(names) if not store.check([name]))
    return (
        f"rank {missing or 'none'} of {size} did not come within {seconds:g} s; check that every rank was started, and "
        "what the missing ones say"
    )
