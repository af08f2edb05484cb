"""How ranks find each other: in one life, in the next one on the same store, and when some do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from turbogr.errors import UserError
from turbogr.parallel.meeting import meet


def come(store: HashStore, restarted: Sequence[bool], delays: Sequence[float] | None = None) -> list[tuple[str, bool]]:
    """All ranks meet, each on a thread of its own after its delay."""
    size = len(restarted)
    found: dict[int, tuple[str, bool]] = {}

    def one(rank: int) -> None:
        time.sleep((delays or [0.0] * size)[rank])
        found[rank] = meet(store, rank, size, 20.0, restarted=restarted[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("delays", [None, [0.3, 0.0, 0.1], [0.0, 0.3, 0.1]], ids=["at once", "0 last", "0 first"])
def test_all_ranks_agree_on_one_life(delays: list[float] | None) -> None:
    (first, *others) = come(HashStore(), [False] * 3, delays)
    assert others == [first, first] and first[1] is False


@pytest.mark.parametrize("delays", [None, [0.0, 0.3, 0.6], [0.6, 0.0, 0.3]], ids=["at once", "0 first", "0 last"])
def test_the_next_life_on_the_same_store_is_another_whoever_counts_the_restart(delays: list[float] | None) -> None:
    store = HashStore()
    before = come(store, [False] * 3)
    # The agent whose ranks failed counts the restart; the other one, which only lost its peers, does not.
    after = come(store, [False, False, True], delays)
    assert len(set(after)) == 1 and after[0][0] != before[0][0]
    assert after[0][1] is True


def test_names_left_by_a_life_that_never_began_do_no_harm() -> None:
    store = HashStore()
    with pytest.raises(UserError):
        meet(store, 1, 2, 0.2)
    assert len(set(come(store, [False, True], [0.0, 0.3]))) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_named(rank: int) -> None:
    with pytest.raises(UserError, match=f"rank {'1, 2' if rank == 0 else '0, 2'} of 3 did not come within 0.2 s"):
        meet(HashStore(), rank, 3, 0.2)


def test_ranks_of_the_last_life_that_do_not_come_again_are_named() -> None:
    store = HashStore()
    come(store, [False] * 3)
    errors: dict[int, str] = {}

    def one(rank: int) -> None:
        try:
            meet(store, rank, 3, 1.0, restarted=True)
        except UserError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "rank 2 of 3 did not come" in errors[0] and "rank 2 of 3 did not come" in errors[1]
