from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turbogr.errors import UserError
from turbogr.evaluation import item_ranking as ranking
from turbogr.evaluation.item_ranking import (
    DenseItems,
    VectorScores,
    held_queries,
    positions_both_ways,
    target_positions,
    top_k,
)
from turbogr.evaluation.metrics import MISSED
from turbogr.jagged import Jagged


def naive_ranks(scores: np.ndarray, targets: list[int], seen: list[list[int]]) -> list[int]:
    """The definition, one candidate at a time, on a dense score matrix."""
    ranks = []
    for row, target, gone in zip(scores, targets, seen, strict=True):
        best_first = sorted((item for item in range(len(row)) if item not in gone), key=lambda item: (-row[item], item))
        ranks.append(MISSED if target in gone else 1 + best_first.index(target))
    return ranks


def naive_top_k(scores: np.ndarray, k: int, gone: list[list[int]]) -> list[list[int]]:
    out = []
    for row, excluded in zip(scores, gone, strict=True):
        candidates = [item for item in range(len(row)) if item not in excluded]
        best = sorted(candidates, key=lambda item: (-row[item], item))[:k]
        out.append(best + [-1] * (k - len(best)))
    return out


def jagged(rows: list[list[int]]) -> Jagged:
    return Jagged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int], list[list[int]]]:
    """Small integer vectors: every product and sum is exact, so ties are real and common."""
    num_items = draw(st.integers(1, 40))
    num_queries = draw(st.integers(1, 9))
    width = draw(st.integers(1, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from([1, 2, 50]))
    queries = generator.integers(-values, values + 1, (num_queries, width))
    items = generator.integers(-values, values + 1, (num_items, width))
    targets = generator.integers(0, num_items, num_queries).tolist()
    seen = [generator.integers(0, num_items, generator.integers(0, 2 * num_items)).tolist() for _ in range(num_queries)]
    return torch.tensor(queries).float(), torch.tensor(items).float(), targets, seen


@pytest.fixture(params=["held", "computed again"], autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many tiles and chunks even for tiny problems, with and without room to keep scores, on one thread as in use."""
    monkeypatch.setattr(ranking, "TILE", 4)
    monkeypatch.setattr(ranking, "CHUNK", 7)
    if request.param == "computed again":
        monkeypatch.setattr(ranking, "HELD_BYTES", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@given(problems())
@settings(deadline=None)
def test_ranks_follow_the_definition(problem: tuple[Tensor, Tensor, list[int], list[list[int]]]) -> None:
    queries, items, targets, seen = problem
    scores = (queries.double() @ items.double().T).numpy()
    ranks = target_positions(VectorScores(queries, DenseItems(items)), torch.tensor(targets), jagged(seen))
    assert ranks.tolist() == naive_ranks(scores, targets, seen)
    unfiltered = target_positions(VectorScores(queries, DenseItems(items)), torch.tensor(targets))
    assert unfiltered.tolist() == naive_ranks(scores, targets, [[]] * len(targets))
    both = positions_both_ways(VectorScores(queries, DenseItems(items)), torch.tensor(targets), jagged(seen))
    assert both.exclude_seen.tolist() == ranks.tolist()
    assert both.include_seen.tolist() == unfiltered.tolist()


@given(problems(), st.integers(1, 50))
@settings(deadline=None)
def test_top_k_follows_the_definition(problem: tuple[Tensor, Tensor, list[int], list[list[int]]], k: int) -> None:
    queries, items, _, excluded = problem
    scores = (queries.double() @ items.double().T).numpy()
    found, rows = top_k(VectorScores(queries, DenseItems(items)), k, jagged(excluded))
    assert rows.tolist() == naive_top_k(scores, k, excluded)
    for query in range(len(queries)):
        kept = rows[query] >= 0
        assert found[query, kept].tolist() == scores[query][rows[query, kept].numpy()].tolist()
        assert (found[query, ~kept] == -torch.inf).all()


@given(problems())
@settings(deadline=None)
def test_a_rank_is_the_place_in_the_top_list(problem: tuple[Tensor, Tensor, list[int], list[list[int]]]) -> None:
    queries, items, targets, seen = problem
    ranks = target_positions(VectorScores(queries, DenseItems(items)), torch.tensor(targets), jagged(seen)).tolist()
    _, rows = top_k(VectorScores(queries, DenseItems(items)), len(items), jagged(seen))
    for rank, row, target in zip(ranks, rows.tolist(), targets, strict=True):
        assert target not in row if rank == MISSED else row[rank - 1] == target


def near_ties(num_queries: int, num_items: int, width: int) -> tuple[Tensor, Tensor]:
    """Items that differ from one direction by a few units in the last place: any change of rounding reorders them."""
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(width, generator=generator)
    items = direction + 1e-7 * torch.randn(num_items, width, generator=generator)
    queries = direction + 1e-6 * torch.randn(num_queries, width, generator=generator)
    return torch.nn.functional.normalize(queries, dim=1), torch.nn.functional.normalize(items, dim=1)


@pytest.mark.parametrize("width", [3, 50, 128])
def test_no_digit_changes_with_the_number_of_queries_in_a_call(
    width: int, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "TILE", 64)
    monkeypatch.setattr(ranking, "CHUNK", 512)
    queries, items = near_ties(64 * 5 + 1, 1500, width)
    targets = torch.arange(len(queries)) * 3
    seen = jagged([[row, row + 1, row * 2] for row in range(len(queries))])
    all_ranks = target_positions(VectorScores(queries, DenseItems(items)), targets, seen)
    all_scores, all_rows = top_k(VectorScores(queries, DenseItems(items)), 20, seen)
    assert len(set(all_ranks.tolist())) > 100, "the problem must have many different ranks"
    for size in (64, 128, 192):
        for first in range(0, len(queries), size):
            cut = slice(first, first + size)
            part = Jagged.from_rows([seen[row] for row in range(*cut.indices(len(queries)))])
            assert torch.equal(
                target_positions(VectorScores(queries[cut], DenseItems(items)), targets[cut], part), all_ranks[cut]
            )
            scores, rows = top_k(VectorScores(queries[cut], DenseItems(items)), 20, part)
            assert torch.equal(rows, all_rows[cut])
            assert torch.equal(scores, all_scores[cut])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("place", ["query", "item"])
def test_scores_that_are_no_numbers_are_refused(bad: float, place: str) -> None:
    queries, items = torch.ones(5, 2), torch.ones(20, 2)
    (queries if place == "query" else items)[3, 1] = bad
    if bad == 3e38:
        queries *= 4
    with pytest.raises(UserError, match="not finite"):
        target_positions(VectorScores(queries, DenseItems(items)), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(UserError, match="not finite"):
        top_k(VectorScores(queries, DenseItems(items)), 3)


def test_items_are_asked_for_in_chunks_only() -> None:
    class Counting:
        num_items = 100

        def __init__(self) -> None:
            self.asked: list[tuple[int, int]] = []

        def item_rows(self, start: int, stop: int) -> Tensor:
            self.asked.append((start, stop))
            return torch.ones(stop - start, 2)

    items = Counting()
    top_k(VectorScores(torch.ones(30, 2), items), 5)
    assert items.asked == [(start, min(start + 7, 100)) for start in range(0, 100, 7)]


def test_nothing_asked_nothing_answered() -> None:
    items = DenseItems(torch.ones(3, 2))
    assert target_positions(VectorScores(torch.ones(0, 2), items), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    scores, rows = top_k(VectorScores(torch.ones(0, 2), items), 4)
    assert scores.shape == rows.shape == (0, 4)
    with pytest.raises(UserError, match="k is 0"):
        top_k(VectorScores(torch.ones(1, 2), items), 0)


@pytest.mark.parametrize("num_items", [1, 3706, 100_000, 10_000_000])
def test_held_queries_are_whole_tiles(num_items: int) -> None:
    assert ranking.TILE <= held_queries(num_items) <= 1024
    assert held_queries(num_items) % ranking.TILE == 0
