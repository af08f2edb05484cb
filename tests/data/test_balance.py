from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.balance import StepPlan, contiguous_owners, plan_steps, resolve_strategy, wait_share
from turbogr.data.batching import plan_batches
from turbogr.data.cost import CostModel

STRATEGIES = ("auto", "none", "token-budget", "reallocate")
COST = CostModel(1.0, 1 / 64)


@st.composite
def plans(draw: st.DrawFn, strategies: tuple[str, ...] = STRATEGIES) -> tuple[np.ndarray, dict[str, Any]]:
    """Lengths and the options of a plan."""
    lengths = draw(st.lists(st.integers(1, 300) | st.integers(1, 3), max_size=60))
    world = draw(st.integers(1, 9))
    strategy = draw(st.sampled_from(strategies))
    by_tokens = strategy == "token-budget" or draw(st.booleans())
    batch = {"batch_tokens": draw(st.integers(1, 2000))} if by_tokens else {"batch_size": draw(st.integers(1, 40))}
    speeds = draw(st.none() | st.lists(st.floats(0.1, 10), min_size=world, max_size=world))
    options = {"world": world, "strategy": strategy, "speeds": speeds, "cost": COST, "seed": draw(st.integers(0, 5))}
    return np.array(lengths, np.int64), {**options, **batch, "epoch": draw(st.integers(0, 3))}


def loads(plan: StepPlan, weights: np.ndarray) -> np.ndarray:
    """Sum of `weights` per step and rank, relative to the rank's speed."""
    return np.array([[weights[part].sum() for part in step] for step in plan]).reshape(-1, plan.world) / plan.speeds


@given(plans())
def test_every_sequence_comes_once_to_one_rank(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    lengths, options = case
    plan = plan_steps(lengths, **options)
    assert all(len(step) == options["world"] for step in plan)
    assigned = [int(sequence) for step in plan for part in step for sequence in part]
    assert sorted(assigned) == list(range(len(lengths)))


@given(plans())
def test_a_step_is_the_same_batch_on_any_number_of_ranks(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    lengths, options = case
    batch = {key: options.get(key) for key in ("batch_size", "batch_tokens", "seed", "epoch")}
    batches = plan_batches(lengths, **batch)  # type: ignore[arg-type]
    plan = plan_steps(lengths, **options)
    assert len(plan) == len(batches)
    for step, expected in enumerate(batches):
        np.testing.assert_array_equal(plan.global_batch(step), expected)
        assert sorted(np.concatenate(plan[step]).tolist()) == sorted(expected.tolist())


@given(plans())
def test_no_step_is_above_the_budget_unless_a_single_sequence(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    lengths, options = case
    if "batch_tokens" not in options:
        return
    for step in plan_steps(lengths, **options):
        batch = np.concatenate(step)
        assert lengths[batch].sum() <= options["batch_tokens"] or len(batch) == 1


@given(plans(("token-budget",)))
def test_a_rank_exceeds_its_part_of_the_budget_by_less_than_a_sequence(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    lengths, options = case
    options["speeds"] = None
    for step in plan_steps(lengths, **options):
        batch = lengths[np.concatenate(step)]
        tokens = [lengths[part].sum() for part in step]
        # the mean of a step may itself be below the part of the budget
        assert max(tokens) <= max(batch.sum() / len(step) * 1.001, batch.sum() / len(step) + batch.max())


@given(plans(("reallocate",)))
def test_reallocation_is_never_less_equal_than_equal_numbers(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    lengths, options = case
    costs = COST.cost(lengths)
    balanced = loads(plan_steps(lengths, **options), costs).max(axis=1)
    naive = loads(plan_steps(lengths, **{**options, "strategy": "none"}), costs).max(axis=1)
    assert (balanced <= naive * (1 + 1e-6)).all()


@given(plans())
def test_every_rank_computes_the_same_plan(case: tuple[np.ndarray, dict[str, Any]]) -> None:
    lengths, options = case
    one, other = plan_steps(lengths, **options), plan_steps(lengths.copy(), **options)
    for step in reversed(range(len(one))):  # asked for in another order
        for mine, theirs in zip(one[step], other[step], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def lognormal(num: int, longest: int, seed: int = 0) -> np.ndarray:
    draws = 8591 * np.exp(0.796 * np.random.default_rng(seed).standard_normal(num))
    return np.clip(draws, 5, longest).astype(np.int64)


@pytest.mark.parametrize("world", [16, 33])
def test_long_sequences_are_balanced_below_one_per_cent(world: int) -> None:
    lengths = lognormal(world * 8 * 10, 8192)
    cost = CostModel(1.0, 1 / 5120)
    plan = plan_steps(lengths, world=world, batch_size=world * 8, cost=cost)
    assert plan.strategy == "reallocate"
    balanced = wait_share(loads(plan, cost.cost(lengths)))
    assert balanced < 0.01
    assert wait_share(loads(plan, lengths)) < 0.01
    naive = plan_steps(lengths, world=world, batch_size=world * 8, cost=cost, strategy="none")
    assert wait_share(loads(naive, cost.cost(lengths))) > 5 * balanced


def test_short_sequences_are_balanced_by_tokens() -> None:
    lengths = np.random.default_rng(0).integers(3, 50, 20_000)
    plan = plan_steps(lengths, world=16, batch_tokens=16 * 4096)
    assert plan.strategy == "token-budget"
    tokens = loads(plan, lengths)[:-1]  # the last step is what is left
    assert wait_share(tokens) < 0.002
    assert tokens.max() <= 4096 * 1.002 and tokens.min() > 4096 * 0.99


def test_slower_ranks_get_less() -> None:
    lengths = lognormal(8 * 8 * 4, 8192)
    speeds = [1.0] * 4 + [0.5] * 3 + [0.25]
    plan = plan_steps(lengths, world=8, batch_size=64, cost=COST, speeds=speeds)
    assert wait_share(loads(plan, COST.cost(lengths))) < 0.03
    unaware = plan_steps(lengths, world=8, batch_size=64, cost=COST)
    assert wait_share(loads(unaware, COST.cost(lengths)) / np.array(speeds)) > 0.5


def test_balancing_leaves_the_order_of_a_rank_as_shuffled() -> None:
    plan = plan_steps(lognormal(64, 8192), world=4, batch_size=32)
    place = np.argsort(plan.order)
    assert all((np.diff(place[part]) > 0).all() for step in plan for part in step)


def test_no_sequences_make_no_steps() -> None:
    plan = plan_steps(np.empty(0, np.int64), world=4, batch_size=8)
    assert len(plan) == 0 and list(plan) == []


def test_a_rank_may_have_nothing_to_do() -> None:
    (step,) = plan_steps(np.array([5, 900, 7]), world=8, batch_size=4)
    assert sorted(len(part) for part in step) == [0] * 5 + [1] * 3
    (step,) = plan_steps(np.array([10_000, 5, 7, 6]), world=2, batch_size=4)
    assert [part.tolist() for part in step if 0 in part] == [[0]], "a giant has a rank of its own"


def test_equal_lengths_are_assigned_evenly() -> None:
    for step in plan_steps(np.full(64, 7), world=4, batch_size=16):
        assert [len(part) for part in step] == [4, 4, 4, 4]


def test_auto_knows_short_sequences_from_long_ones() -> None:
    short, long = np.full(10, 20), np.full(10, 4000)
    cost = CostModel(1.0, 1 / 5120)
    assert resolve_strategy("auto", short, cost, batch_tokens=100) == "token-budget"
    assert resolve_strategy("auto", long, cost, batch_tokens=100) == "reallocate"
    assert resolve_strategy("auto", short, cost) == "reallocate"
    assert resolve_strategy("none", long, cost) == "none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0, "batch_size": 1}, "world"),
        ({"world": 1}, "exactly one"),
        ({"world": 1, "batch_size": 1, "batch_tokens": 1}, "exactly one"),
        ({"world": 1, "batch_size": 0}, "at least 1"),
        ({"world": 1, "batch_size": 1, "strategy": "best"}, "strategy"),
        ({"world": 1, "batch_size": 1, "strategy": "token-budget"}, "batch_tokens"),
        ({"world": 2, "batch_size": 1, "speeds": [1.0]}, "1 numbers for 2 ranks"),
        ({"world": 2, "batch_size": 1, "speeds": [1.0, 0.0]}, "positive"),
        ({"world": 2, "batch_size": 1, "speeds": [1.0, float("nan")]}, "positive"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_steps(np.array([3, 4]), **options)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        plan_steps(np.array([3, -1]), world=1, batch_size=1)


def test_a_step_outside_the_epoch_is_refused() -> None:
    plan = plan_steps(np.array([3, 4]), world=1, batch_size=1)
    for step in (2, -1):
        with pytest.raises(IndexError):
            plan[step]


@given(st.integers(0, 50), st.integers(1, 12))
def test_contiguous_parts_differ_by_at_most_one(num: int, world: int) -> None:
    owners = contiguous_owners(num, world)
    assert (np.diff(owners) >= 0).all()
    counts = np.bincount(owners, minlength=world)
    assert len(counts) == world and counts.max() - counts.min() <= 1


def test_wait_share_is_the_time_waited_over_the_time_of_the_steps() -> None:
    assert wait_share(np.array([[1.0, 1.0], [3.0, 3.0]])) == 0.0
    # step 1 lasts 2 and one of two ranks waits 1; step 2 lasts 6 and nobody waits
    assert wait_share(np.array([[2.0, 1.0], [6.0, 6.0]])) == pytest.approx(1 / 16)
    assert wait_share(np.array([4.0, 0.0])) == 0.5
    assert wait_share(np.empty((0, 4))) == wait_share(np.zeros((2, 3))) == 0.0
