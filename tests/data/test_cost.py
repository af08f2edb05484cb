from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.cost import CostModel, calibrate

STEPS = [np.full(4, 64), np.full(2, 256), np.full(1, 1024), np.array([64, 512, 700]), np.full(16, 128), np.full(8, 512)]


def test_cost_of_a_sequence_and_of_a_step() -> None:
    cost = CostModel(a=2.0, b=0.5, fixed=10.0)
    np.testing.assert_allclose(cost.cost(np.array([0, 1, 4])), [0.0, 2.5, 16.0])
    assert cost.step_cost(np.array([1, 4])) == 28.5
    assert CostModel().cost(np.array([7])).tolist() == [7.0]


@pytest.mark.parametrize("values", [(-1.0, 1.0), (1.0, -1.0), (0.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_impossible_costs_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="cost"):
        CostModel(*values)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50))
def test_whole_costs_are_in_proportion(lengths: list[int]) -> None:
    cost = CostModel(3e-7, 2e-10)
    whole = cost.whole_costs(np.array(lengths))
    assert whole.dtype == np.int64 and whole.max() == 2**32
    exact = cost.cost(np.array(lengths))
    np.testing.assert_allclose(whole / 2**32, exact / exact.max(), atol=2**-33)


def test_whole_costs_of_nothing() -> None:
    assert CostModel().whole_costs(np.empty(0, np.int64)).tolist() == []
    assert CostModel().whole_costs(np.zeros(2, np.int64)).tolist() == [0, 0]


@pytest.mark.parametrize("true", [CostModel(2e-6, 3e-9, 4e-3), CostModel(2e-6, 0.0, 0.0), CostModel(0.0, 3e-9, 1e-3)])
def test_calibration_finds_the_coefficients(true: CostModel) -> None:
    found = calibrate([(lengths, true.step_cost(lengths)) for lengths in STEPS])
    np.testing.assert_allclose([found.a, found.b, found.fixed], [true.a, true.b, true.fixed], rtol=1e-6, atol=1e-12)


def test_calibration_stays_non_negative_under_noise() -> None:
    random = np.random.default_rng(0)
    true = CostModel(2e-6, 1e-11, 1e-4)
    for _ in range(50):
        noisy = [(lengths, true.step_cost(lengths) * random.uniform(0.7, 1.3)) for lengths in STEPS]
        found = calibrate(noisy)
        assert min(found.a, found.b, found.fixed) >= 0
        assert found.cost(np.array([512]))[0] == pytest.approx(true.cost(np.array([512]))[0], rel=0.6)


def test_calibration_knows_lengths_even_if_times_fall_with_them() -> None:
    found = calibrate([(np.full(1, 100), 5.0), (np.full(1, 200), 1.0)])
    assert found.a + found.b > 0


def test_calibration_needs_measurements() -> None:
    with pytest.raises(ValueError, match="two steps"):
        calibrate([(np.array([5]), 1.0), (np.empty(0, np.int64), 1.0)])
    with pytest.raises(ValueError, match="positive"):
        calibrate([(np.array([5]), 1.0), (np.array([6]), 0.0)])
