from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.bench import _balance_measured, balance, run_benchmark
from turbogr.bench._balance_learning import learning_curves, length_correlation
from turbogr.bench._partition import karmarkar_karp, zigzag
from turbogr.data.cost import CostModel
from turbogr.errors import UserError
from turbogr.parallel.world import World

SMALL = ["worlds=[4, 8]", "sequences=2048", "max_len=1024", "max_lens=[512]", "batch_sizes=[2, 8]", "ranks=0"]


@pytest.fixture(scope="module")
def result() -> tuple[balance.Result, dict[str, float]]:
    record, found = run_benchmark("balance", [*SMALL, "median=600", "mean=800", "amazon_batch_size=16", "ranks=0"])
    return found, record.figures


def test_the_record_has_the_documented_keys(result: tuple[balance.Result, dict[str, float]]) -> None:
    _, figures = result
    for world in (4, 8):
        for when in ("before", "after"):
            assert {f"imbalance_{when}_{world}", f"max_token_difference_{when}_{world}"} <= figures.keys()
        assert 0 <= figures[f"imbalance_after_{world}"] < figures[f"imbalance_before_{world}"] < 100
    assert figures["amazon_imbalance_after_16"] < figures["amazon_imbalance_before_16"]
    assert figures["imbalance_unequal_after_16"] < figures["imbalance_unequal_before_16"]
    assert figures["plan_seconds_100k_1024"] > 0


def test_the_tables_and_the_plot_exist(result: tuple[balance.Result, dict[str, float]]) -> None:
    found, _ = result
    methods = next(table for table in found.tables if "Methods to assign" in table.title)
    ours, naive = methods.rows[4], methods.rows[0]
    assert ours[1] == "greedy, then exchanges" and ours[2] < naive[2]  # type: ignore[operator]
    assert found.plots["balance"].startswith("<svg")


def test_waiting_is_taken_over_whole_steps() -> None:
    cost = CostModel(1.0)
    equal = balance.plan_steps(np.full(5, 7), world=2, batch_size=4, strategy="none", cost=cost)
    assert balance.waiting(equal).cost == 0, "the last step has one sequence for two ranks"
    one = balance.plan_steps(np.array([30, 10]), world=2, batch_size=2, strategy="none", cost=cost)
    found = balance.waiting(one)
    assert (found.cost, found.tokens, found.token_difference) == pytest.approx((100 / 3, 100 / 3, 20))
    assert balance.waiting(one, CostModel(0.0, 1.0)).cost == pytest.approx(100 * (1 - 500 / 900))


def test_one_rank_does_not_wait() -> None:
    found = _balance_measured.measure(World(), {"steps": 2, "median": 1600.0, "mean": 2000.0})
    for when in ("before", "after"):
        assert found[when]["waiting"] == found[when]["planned"] == 0
        assert found[when]["seconds"] > 0


def test_the_measurement_is_printed_in_per_cent_and_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"waiting": 0.25, "planned": 0.2, "seconds": 0.5}
    measured = {"cost": [2e-6, 1e-9], "before": found, "after": found}
    monkeypatch.setattr(_balance_measured, "run_as_ranks", lambda module, ranks, options: measured)
    figures: dict[str, float] = {}
    table = _balance_measured.measured_waiting(2, 0, 100.0, 120.0, figures)
    assert figures == {"wait_share_before_2": 25.0, "wait_share_after_2": 25.0}
    assert table.rows[0] == ["none", 25.0, 20.0, 500.0] and "2·n + 0.001·n²" in table.title


def test_lognormal_has_the_given_median_and_mean() -> None:
    lengths = balance.lognormal(200_000, 8591, 11796, 10**7)
    assert np.median(lengths) == pytest.approx(8591, rel=0.01)
    assert lengths.mean() == pytest.approx(11796, rel=0.01)
    assert balance.lognormal(1000, 8591, 11796, 100).max() == 100


@pytest.mark.parametrize(("setting", "words"), [("preset=larg", "large"), ("cost=[1.0]", "two numbers")])
def test_bad_settings_are_refused(setting: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_benchmark("balance", [setting])


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 6))
def test_the_compared_methods_give_every_sequence_a_rank(costs: list[int], world: int) -> None:
    for method in (zigzag, karmarkar_karp):
        owners = method(np.array(costs, np.int64), world)
        assert len(owners) == len(costs) and ((owners >= 0) & (owners < world)).all()


def test_karmarkar_karp_and_zigzag_by_hand() -> None:
    costs = np.array([8, 7, 6, 5, 4])
    halves = np.bincount(karmarkar_karp(costs, 2), weights=costs)
    assert sorted(halves) == [14, 16], "Karmarkar and Karp's own example"
    assert zigzag(np.array([1, 2, 3, 4, 5]), 2).tolist() == [0, 0, 1, 1, 0]


def test_length_correlation_differs_for_sorted_and_mixed_batches() -> None:
    lengths = np.repeat([1, 2, 3, 4], 10)
    batches = [np.arange(i, i + 10) for i in range(0, 40, 10)]
    assert length_correlation(lengths, batches) == pytest.approx(1)
    mixed = [np.arange(i, 40, 10) for i in range(10)]
    assert length_correlation(lengths, mixed) < 0
    assert length_correlation(lengths, [np.arange(1)] * 2 + [np.arange(2)]) == 0


def test_learning_curves_of_both_kinds_of_batches() -> None:
    curves = learning_curves(1, num_users=40, num_items=60)
    assert [row[0] for row in curves.table.rows] == ["batches of sequences", "batches of tokens"]
    assert all(np.isfinite(value) for value in curves.figures.values())
    assert curves.plot.startswith("<svg")
