"""Samplers: the distributions they claim, and that a draw depends on (seed, step, event) alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.negatives.batches import make_batch, part_of
from tests.ops.judging import by_number_of_threads
from turbogr.config import HARD_DELAY, LossConfig
from turbogr.negatives import DrawRequest, LossContext
from turbogr.negatives.alias import AliasTable
from turbogr.negatives.hard import HardCache
from turbogr.negatives.sampled_softmax_loss import SampledSoftmaxLoss
from turbogr.negatives.samplers import (
    HardSampler,
    InBatchSampler,
    MixtureSampler,
    PopularitySampler,
    UniformSampler,
    shared_out,
)
from turbogr.tables.table import LocalTable

NUM_ITEMS = 40
COUNTS = np.concatenate([[0, 1, 500], np.arange(37) ** 2])

CONTEXT = LossContext(NUM_ITEMS, 1, lambda: COUNTS)
CONFIGS = {
    "uniform": LossConfig(num_negatives=6),
    "popularity": LossConfig(num_negatives=6, sampler="popularity"),
    "in-batch": LossConfig(num_negatives=6, sampler="in-batch"),
    "mixture": LossConfig(num_negatives=6, sampler="mixture", shares=(0.4, 0.2, 0.4, 0.0)),
    "hard": LossConfig(num_negatives=6, sampler="mixture", shares=(0.5, 0.0, 0.0, 0.5), hard_size=3),
    "group": LossConfig(num_negatives=6, expansion=3),
    "hard group": LossConfig(num_negatives=6, sampler="mixture", shares=(0.5, 0.0, 0.0, 0.5), hard_size=3, expansion=3),
    "positions": LossConfig(num_negatives=6, expansion=3, sharing="positions", sampler="popularity"),
}


def make_objective(config: LossConfig) -> SampledSoftmaxLoss:
    objective = SampledSoftmaxLoss(config, None, LossContext(NUM_ITEMS, 5, lambda: COUNTS))
    table = LocalTable(NUM_ITEMS, 8)
    table.draw(0, NUM_ITEMS, 0)
    objective.refresh(table.weight, 0)
    return objective


FIRST = HARD_DELAY
"""The first step that draws from the lists made at step 0."""


def request(num_keys: int, batch: torch.Tensor) -> DrawRequest:
    return DrawRequest(torch.arange(num_keys) * 7 + 3, 11, batch[:1].expand(num_keys, 1), batch)


def chi_square(drawn: torch.Tensor, expected: np.ndarray) -> float:
    """The statistic's distance from its mean, in standard deviations."""
    observed = np.bincount(drawn.flatten().numpy(), minlength=len(expected)).astype(np.float64)
    wanted = expected * observed.sum()
    assert (observed[wanted == 0] == 0).all()
    some = wanted > 0
    statistic = ((observed - wanted)[some] ** 2 / wanted[some]).sum()
    freedom = some.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("exponent", [0.0, 0.75, 1.0, 2.0])
def test_popularity_has_its_distribution(exponent: float) -> None:
    sampler = PopularitySampler(LossConfig(popularity_exponent=exponent), None, CONTEXT)
    weights = np.maximum(COUNTS, 1.0) ** exponent
    probabilities = weights / weights.sum()
    np.testing.assert_allclose(sampler.probabilities(64).numpy(), probabilities)
    assert chi_square(sampler.draw(request(4000, torch.arange(3)), 64), probabilities) < 4


def test_uniform_has_its_distribution() -> None:
    sampler = UniformSampler(LossConfig(), None, CONTEXT)
    assert chi_square(sampler.draw(request(4000, torch.arange(3)), 64), np.full(NUM_ITEMS, 1 / NUM_ITEMS)) < 4


def test_in_batch_draws_each_target_of_the_step_equally_often() -> None:
    batch = torch.tensor([3, 3, 9, 0, 22])
    drawn = InBatchSampler(LossConfig(), None, CONTEXT).draw(request(4000, batch), 64)
    assert chi_square(drawn, np.bincount(batch, minlength=NUM_ITEMS) / 5) < 4


def test_a_mixture_has_the_mean_of_its_parts() -> None:
    config = LossConfig(num_negatives=64, sampler="mixture", shares=(0.25, 0.75, 0.0, 0.0))
    sampler = SampledSoftmaxLoss(config, None, CONTEXT).sampler
    weights = np.maximum(COUNTS, 1.0) ** 0.75
    expected = 0.25 / NUM_ITEMS + 0.75 * weights / weights.sum()
    probabilities = sampler.probabilities(64)
    assert probabilities is not None
    np.testing.assert_allclose(probabilities.numpy(), expected)
    drawn = sampler.draw(request(4000, torch.arange(3)), 64)
    assert chi_square(drawn, expected) < 4
    assert chi_square(drawn[:, :16], np.full(NUM_ITEMS, 1 / NUM_ITEMS)) < 4


def test_shares_of_a_few_are_corrected_for_as_they_are_drawn() -> None:
    config = LossConfig(num_negatives=3, sampler="mixture", shares=(0.5, 0.5, 0.0, 0.0))
    weights = np.maximum(COUNTS, 1.0) ** 0.75
    for expansion, uniform in ((1, 2 / 3), (2, 1 / 2)):
        objective = SampledSoftmaxLoss(dataclasses.replace(config, expansion=expansion), None, CONTEXT)
        expected = uniform / NUM_ITEMS + (1 - uniform) * weights / weights.sum()
        drawn = objective.draw(make_batch([8000], NUM_ITEMS), 11)
        assert chi_square(drawn, expected) < 4
        assert objective.log_q is not None
        np.testing.assert_allclose(objective.log_q.exp().numpy(), expected, rtol=1e-5)


def test_a_wrong_distribution_would_be_noticed() -> None:
    drawn = PopularitySampler(LossConfig(), None, CONTEXT).draw(request(4000, torch.arange(3)), 64)
    weights = np.maximum(COUNTS, 1.0) ** 0.8
    assert chi_square(drawn, weights / weights.sum()) > 20


def check_alias_table(weights: np.ndarray) -> None:
    """The table's probabilities are those of `weights` up to rounding; integers, so that the check adds none."""
    table, cell = AliasTable.of(weights), 2**31 - 1
    kept, aliases = table.thresholds.numpy().astype(np.int64), table.aliases.numpy()
    assert kept.min() >= 0 and aliases.min() >= 0 and aliases.max() < len(weights)
    given = np.zeros(len(weights), np.int64)
    np.add.at(given, aliases, cell - kept)
    implied = kept + given  # of len(weights) * cell
    assert implied.sum() == len(weights) * cell
    wanted = weights / weights.max()
    wanted *= len(weights) / wanted.sum() * cell
    np.testing.assert_allclose(implied.astype(np.float64), wanted, rtol=1e-14, atol=1.01)
    assert (implied[weights == 0] == 0).all()


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [5, 1],
        [1e-9, 1, 1e9],
        [1e-300, 1e300, 0, 1e300],
        [5e-324, 5e-324, 0],
        [1.7e308] * 3,
        [0, 0, 7, 0],
        [1, 1, 1, 1 + 2**-52],
        np.arange(1, 1001) ** -1.2,
        np.random.default_rng(0).random(777) + 1e-6,
        np.random.default_rng(1).pareto(0.3, 200_000),
        np.concatenate([np.full(300_000, 0.3), np.full(100_000, 1.7)]),
    ],
)
def test_an_alias_table_has_exactly_its_weights(weights: object) -> None:
    check_alias_table(np.asarray(weights, np.float64))


def test_an_alias_table_of_any_number_of_equal_items() -> None:
    """Their sum is rounded up about as often as down, so that every item may seem to be less likely than the mean."""
    for num_items in [*range(1, 200), 999, 3706, 100_003]:
        for count in (1, 3, 10, 123):
            check_alias_table(np.full(num_items, float(count)) ** 0.75)


def test_an_alias_table_of_any_weights() -> None:
    random = np.random.default_rng(0)
    for _ in range(400):
        weights = random.integers(0, 5, random.integers(1, 30)).astype(np.float64)
        weights[random.integers(len(weights))] += 1
        check_alias_table(weights)
        check_alias_table(weights ** random.uniform(0, 3) * 10.0 ** random.integers(-250, 250))


def test_an_item_of_weight_zero_is_never_drawn() -> None:
    drawn = AliasTable.of(np.array([0.0, 1.0, 0.0, 2.0])).draw(torch.arange(2000), 3, 8)
    assert drawn.unique().tolist() == [1, 3]


def test_items_that_occur_equally_often_can_be_drawn() -> None:
    context = LossContext(60, 1, lambda: np.full(60, 10))
    sampler = PopularitySampler(LossConfig(sampler="popularity"), None, context)
    assert chi_square(sampler.draw(request(4000, torch.arange(3)), 64), np.full(60, 1 / 60)) < 4


@pytest.mark.parametrize("name", CONFIGS)
def test_a_draw_depends_on_the_event_and_not_on_who_draws_it(name: str) -> None:
    objective = make_objective(CONFIGS[name])
    batch = make_batch([7, 1, 4, 3], NUM_ITEMS)
    whole = objective.draw(batch, FIRST)
    assert not torch.equal(whole, objective.draw(batch, FIRST + 1))
    groups = objective._groups(batch.items.offsets)
    for sequences in ([0, 2], [3, 1], [2]):
        part, chosen = part_of(batch, sequences)
        rows = chosen
        if groups is not None:
            places = {int(first): number for number, first in enumerate(groups[:-1])}
            rows = torch.tensor([places[int(t)] for t in chosen if int(t) in places])
        assert torch.equal(objective.draw(part, FIRST), whole[rows])
    for drawn in by_number_of_threads(lambda: [objective.draw(batch, FIRST)]):
        assert torch.equal(drawn[0], whole)


def test_an_empty_part_of_a_batch_draws_nothing() -> None:
    batch = make_batch([3, 2], NUM_ITEMS)
    part, _ = part_of(batch, [0])
    nothing = part.items.from_lengths(part.items.values[:0], torch.empty(0, dtype=torch.int64))
    empty = dataclasses.replace(part, items=nothing, events=part.events[:0], targets=batch.items.values[:0])
    for config in CONFIGS.values():
        assert make_objective(config).draw(empty, 0).shape[0] == 0


def test_hard_negatives_are_the_closest_items() -> None:
    weight = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    cache = HardCache(50, 4, every=100, seed=0)
    assert cache.is_due(0) and not cache.is_due(3)
    first = cache.lists_for(HARD_DELAY - 1).clone()
    cache.refresh(weight, 0)
    assert not cache.is_due(0) and cache.is_due(100)
    cosine = torch.nn.functional.cosine_similarity(weight[:, None], weight[None], dim=2).fill_diagonal_(-2)
    nearest = cosine.topk(4, dim=1).indices
    assert torch.equal(cache.lists_for(HARD_DELAY).long(), nearest)
    cache.refresh(-weight.flip(0), 100)
    assert torch.equal(cache.lists_for(99 + HARD_DELAY).long(), nearest), "the new lists come into use later"
    assert not torch.equal(cache.lists_for(100 + HARD_DELAY).long(), nearest)
    assert torch.equal(HardCache(50, 4, every=100, seed=0).lists_for(HARD_DELAY - 1), first)


def test_a_large_catalogue_is_looked_up_in_changing_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbogr.negatives.hard._MAX_CANDIDATES", 10)
    weight = torch.randn(95, 6, generator=torch.Generator().manual_seed(0))
    cache = HardCache(95, 4, every=100, seed=0)
    seen = []
    for step in (0, 100):
        cache.refresh(weight, step)
        lists = cache.lists_for(step + HARD_DELAY)
        items = lists.unique()
        assert len(items) <= 10 and (lists != torch.arange(95)[:, None]).all()
        assert all(row.unique().numel() == 4 for row in lists)
        seen.append(set(items.tolist()))
    assert seen[0] != seen[1]
    for number in range(200):
        candidates = cache._candidates(95, number)
        assert candidates.unique().numel() == 10 and int(candidates.min()) >= 0 and int(candidates.max()) < 95
        seen[0].update(candidates.tolist())
    assert seen[0] == set(range(95)), "every item's turn comes"


def test_hard_negatives_belong_to_the_position() -> None:
    objective = make_objective(CONFIGS["hard"])
    batch = make_batch([5, 3], NUM_ITEMS)
    assert batch.targets is not None and isinstance(objective.sampler, MixtureSampler)
    hard = objective.sampler.parts[-1][0]
    assert isinstance(hard, HardSampler)
    drawn = objective.draw(batch, FIRST)
    nearest = hard.cache.lists_for(FIRST)[batch.targets]
    assert (drawn[:, 3:, None] == nearest[:, None, :]).any(2).all()


def test_hard_negatives_are_drawn_evenly_from_their_list() -> None:
    sampler = HardSampler(LossConfig(hard_size=5, hard_every=100), None, CONTEXT)
    sampler.refresh(torch.randn(NUM_ITEMS, 6, generator=torch.Generator().manual_seed(0)), 0)
    keys, target = torch.arange(4000), torch.full((4000, 1), 7)
    drawn = sampler.draw(DrawRequest(keys, FIRST, target, target[:, 0]), 16)
    expected = np.bincount(sampler.cache.lists_for(FIRST)[7].numpy(), minlength=NUM_ITEMS) / 5
    assert chi_square(drawn, expected) < 4


@pytest.mark.parametrize(
    ("total", "shares", "wanted"),
    [
        (10, [0.5, 0.5], [5, 5]),
        (7, [0.5, 0.25, 0.25], [3, 2, 2]),
        (128, [0.1, 0.2, 0.7], [13, 26, 89]),
        (3, [1.0], [3]),
    ],
)
def test_shares_become_whole_numbers(total: int, shares: list[float], wanted: list[int]) -> None:
    assert sorted(shared_out(total, shares)) == sorted(wanted)
    assert sum(shared_out(total, shares)) == total


def test_equal_probabilities_need_no_correction() -> None:
    assert make_objective(CONFIGS["uniform"]).log_q is None
    assert make_objective(CONFIGS["hard"]).log_q is None
    assert SampledSoftmaxLoss(LossConfig(sampler="popularity"), None, LossContext(NUM_ITEMS, 0)).log_q is None
    assert make_objective(CONFIGS["popularity"]).log_q is not None
