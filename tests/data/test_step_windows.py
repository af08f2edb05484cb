from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.balance import plan_steps, share_step, wait_share
from turbogr.data.cost import CostModel
from turbogr.data.step_windows import PlannedSteps, plan_windows

COST = CostModel(1.0, 1 / 5120)
RANKS, WINDOW = 16, 32


def half_full(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Lengths with the spread of KuaiRand-27K that are 49.6 % of `longest` in the mean."""
    raw = np.exp(math.sqrt(2 * math.log(11_796 / 8_591)) * np.random.default_rng(seed).standard_normal(count))
    return np.clip(0.473 * longest * raw, 2, longest).astype(np.int64)


def loads(plan: PlannedSteps, weights: np.ndarray) -> np.ndarray:
    """Sum of `weights` by step and part."""
    sums = []
    for step in range(len(plan)):
        chosen, parts = plan.step(step)
        sums.append(np.bincount(parts, weights=weights[chosen], minlength=plan.ranks))
    return np.array(sums)


@given(
    st.lists(st.integers(1, 300) | st.integers(1, 3), max_size=80),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_every_sequence_comes_once(
    lengths: list[int], batch_size: int, ranks: int, window: int, seed: int, epoch: int
) -> None:
    options = {"batch_size": batch_size, "ranks": ranks, "window": window, "seed": seed, "epoch": epoch}
    plan = plan_windows(np.array(lengths, np.int64), cost=COST, **options)  # type: ignore[arg-type]
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert len(plan) == math.ceil(len(lengths) / batch_size), "as many steps as without a plan"
    assert plan.bounds[0] == 0 and plan.bounds[-1] == len(lengths) and (np.diff(plan.bounds) >= 0).all()
    assert len(plan.parts) == len(lengths) and all(0 <= part < ranks for part in plan.parts)
    if plan.refused:
        np.testing.assert_array_equal(
            plan.order, plan_steps(np.array(lengths), world=1, batch_size=batch_size, seed=seed, epoch=epoch).order
        )


@pytest.mark.parametrize("longest", [2048, 4096, 8192])
@pytest.mark.parametrize("per_rank", [2, 5, 8, 15])
def test_ranks_of_a_planned_step_finish_together(per_rank: int, longest: int) -> None:
    lengths = half_full(RANKS * per_rank * 256, longest)
    size = RANKS * per_rank
    plan = plan_windows(lengths, batch_size=size, ranks=RANKS, window=WINDOW, cost=COST)
    assert not plan.refused
    assert wait_share(loads(plan, COST.cost(lengths))) < 0.01
    tokens = loads(plan, lengths).sum(axis=1)
    unplanned = plan_steps(lengths, world=RANKS, batch_size=size, cost=COST)
    random = np.array([lengths[unplanned.global_batch(step)].sum() for step in range(len(unplanned))])
    assert tokens.std() <= random.std()
    means = [lengths[plan.step(step)[0]].mean() for step in range(len(plan))]
    # 256 steps drawn at random correlate by 0.06 or more in one case of three, so it is the excess that counts.
    for values in (tokens, np.array(means)):
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05 + 2 / math.sqrt(len(values))


def test_neighbouring_steps_have_nothing_in_common() -> None:
    """Over many epochs, so that what is left to chance is small."""
    lengths = half_full(32 * 256, 2048)
    found = []
    for epoch in range(12):
        plan = plan_windows(lengths, batch_size=32, ranks=RANKS, window=WINDOW, cost=COST, epoch=epoch)
        means = np.array([lengths[plan.step(step)[0]].mean() for step in range(len(plan))])
        tokens = np.array([lengths[plan.step(step)[0]].sum() for step in range(len(plan))])
        found.append([np.corrcoef(values[:-1], values[1:])[0, 1] for values in (means, tokens)])
    assert np.abs(np.mean(found, axis=0)).max() < 0.05


def test_seed_and_epoch_change_the_plan_and_nothing_else_does() -> None:
    lengths = half_full(32 * 64, 512)
    options = {"batch_size": 32, "ranks": 4, "window": 8, "cost": COST}
    plans = []
    for seed, epoch in ((0, 0), (0, 0), (1, 0), (0, 1)):
        plans.append(plan_windows(lengths, seed=seed, epoch=epoch, **options))  # type: ignore[arg-type]
    for name in ("order", "bounds", "parts"):
        np.testing.assert_array_equal(getattr(plans[0], name), getattr(plans[1], name))
    assert not np.array_equal(plans[0].order, plans[2].order)
    assert not np.array_equal(plans[0].order, plans[3].order)


def test_one_sequence_per_rank_would_vary_more_in_tokens_and_is_refused() -> None:
    lengths = half_full(16 * 128, 2048)
    plan = plan_windows(lengths, batch_size=16, ranks=16, window=32, cost=COST)
    assert plan.refused
    unplanned = plan_steps(lengths, world=16, batch_size=16)
    np.testing.assert_array_equal(plan.order, unplanned.order)
    np.testing.assert_array_equal(plan.bounds, unplanned.bounds)


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_fewer_real_ranks_take_whole_parts(world: int) -> None:
    lengths = half_full(32 * 64, 8192)
    plan = plan_windows(lengths, batch_size=32, ranks=16, window=32, cost=COST)
    costs = []
    for step in range(len(plan)):
        chosen, parts = plan.step(step)
        shares = share_step(
            lengths[chosen], world=world, strategy="reallocate", cost=COST, parts=parts, num_parts=plan.ranks
        )
        assert sorted(np.concatenate(shares).tolist()) == list(range(len(chosen)))
        costs.append([COST.cost(lengths[chosen[share]]).sum() for share in shares])
    assert wait_share(np.array(costs)) <= 0.01


def test_unequal_ranks_share_a_planned_step_by_speed() -> None:
    lengths, speeds = half_full(16 * 8 * 16, 2048), np.array([1.0] * 15 + [0.5])
    plan = plan_windows(lengths, batch_size=128, ranks=16, window=8, cost=COST)
    costs = []
    for step in range(len(plan)):
        chosen, parts = plan.step(step)
        options = {"world": 16, "strategy": "reallocate", "cost": COST, "speeds": speeds}
        shares = share_step(lengths[chosen], parts=parts, num_parts=16, **options)  # type: ignore[arg-type]
        costs.append([COST.cost(lengths[chosen[share]]).sum() for share in shares])
    assert wait_share(np.array(costs) / speeds) < 0.03


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"ranks": 0}, {"window": 0}])
def test_arguments_out_of_range_are_errors(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_windows(np.arange(5), **{"batch_size": 2, "ranks": 2, "window": 2, **wrong}, cost=COST)
