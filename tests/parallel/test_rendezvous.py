"""Ranks find each other: in the first attempt, in a restart on the same store, and when some are missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from turbogr.errors import UserError
from turbogr.parallel.rendezvous import wait_for_ranks


def connect(store: HashStore, size: int, delays: Sequence[float] | None = None) -> list[str]:
    """All ranks connect, each on its own thread after its delay."""
    found: dict[int, str] = {}

    def one(rank: int) -> None:
        time.sleep((delays or [0.0] * size)[rank])
        found[rank] = wait_for_ranks(store, rank, size, 20.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("delays", [None, [0.3, 0.0, 0.1], [0.0, 0.3, 0.1]], ids=["at once", "0 last", "0 first"])
def test_all_ranks_agree_on_one_attempt(delays: list[float] | None) -> None:
    (first, *others) = connect(HashStore(), 3, delays)
    assert others == [first, first]


@pytest.mark.parametrize("delays", [None, [0.0, 0.3, 0.6], [0.6, 0.0, 0.3]], ids=["at once", "0 first", "0 last"])
def test_a_restart_on_the_same_store_is_a_new_attempt(delays: list[float] | None) -> None:
    store = HashStore()
    before = connect(store, 3)
    after = connect(store, 3, delays)
    assert len(set(after)) == 1 and after[0] != before[0]


def test_ids_of_an_attempt_that_never_started_do_no_harm() -> None:
    store = HashStore()
    with pytest.raises(UserError):
        wait_for_ranks(store, 1, 2, 0.2)
    assert len(set(connect(store, 2, [0.0, 0.3]))) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_connect_are_named(rank: int) -> None:
    with pytest.raises(UserError, match=f"rank {'1, 2' if rank == 0 else '0, 2'} of 3 did not connect within 0.2 s"):
        wait_for_ranks(HashStore(), rank, 3, 0.2)


def test_ranks_missing_after_a_restart_are_named() -> None:
    store = HashStore()
    connect(store, 3)
    errors: dict[int, str] = {}

    def one(rank: int) -> None:
        try:
            wait_for_ranks(store, rank, 3, 1.0)
        except UserError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "rank 2 of 3 did not connect" in errors[0] and "rank 2 of 3 did not connect" in errors[1]
