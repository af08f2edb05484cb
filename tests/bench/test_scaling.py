from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.ranks import run_ranks
from turbogr import bench
from turbogr.bench import _scaling_rank, scaling
from turbogr.bench._ranks import RankKilled
from turbogr.bench._simulator import Cluster, Link, OneRank, Work, step_seconds
from turbogr.errors import UserError
from turbogr.parallel.world import connected_world

WORK = Work(num_ids=100_000, num_items=10_000, dim=64, num_parameters=1_000_000)
ONE = OneRank(fetch=0.1, compute=10.0, update=0.2)
INSTANT = Link(0.0, 1e18)


def test_distinct_rows_of_uniform_look_ups() -> None:
    rare = Work(num_ids=10, num_items=10**8, dim=1, num_parameters=1)
    assert rare.distinct() == pytest.approx(10, rel=1e-6)
    assert WORK.distinct() == pytest.approx(10_000 * (1 - 0.9999**100_000), rel=1e-9)
    assert WORK.distinct(100) == pytest.approx(10_000, rel=1e-6)


def test_one_rank_takes_what_was_measured() -> None:
    assert step_seconds(WORK, ONE, Cluster(1, 1, INSTANT, INSTANT, INSTANT)) == pytest.approx(10.3)


@pytest.mark.parametrize(("groups", "members"), [(1, 2), (2, 1), (4, 8), (16, 8)])
def test_instant_links_add_little(groups: int, members: int) -> None:
    seconds = step_seconds(WORK, ONE, Cluster(groups, members, INSTANT, INSTANT, INSTANT))
    assert 10.1 < seconds < 10.6


def test_every_link_counts_its_own_bytes() -> None:
    def added(cluster: Cluster) -> float:
        return step_seconds(WORK, ONE, cluster) - step_seconds(WORK, ONE, _instant(cluster))

    slow = Link(0.0, 1e6)
    rows, all_rows = WORK.distinct(), WORK.distinct(4)
    ring = added(Cluster(2, 2, INSTANT, INSTANT, slow))
    assert ring == pytest.approx(2 * 3 / 4 * 4 * 1_000_000 / 1e6)
    inside = added(Cluster(1, 4, slow, INSTANT, INSTANT))
    assert inside == pytest.approx(rows * 3 / 4 * (8 + 2 * 256) / 1e6)
    across = added(Cluster(4, 1, INSTANT, slow, INSTANT))
    assert across == pytest.approx((rows + all_rows) * 3 / 4 * (8 + 256) / 1e6)


@pytest.mark.parametrize(
    ("cluster", "messages"),
    [
        (Cluster(1, 2, Link(1.0, 1e18), INSTANT, INSTANT), 4),
        (Cluster(1, 8, Link(1.0, 1e18), INSTANT, INSTANT), 4 * 7),
        (Cluster(16, 1, INSTANT, Link(1.0, 1e18), INSTANT), 6 * 15),
        (Cluster(1, 2, INSTANT, INSTANT, Link(1.0, 1e18)), 2),
        (Cluster(8, 16, INSTANT, INSTANT, Link(1.0, 1e18)), 2 * 127),
    ],
)
def test_messages_grow_with_the_ranks(cluster: Cluster, messages: int) -> None:
    added = step_seconds(WORK, ONE, cluster) - step_seconds(WORK, ONE, _instant(cluster))
    assert added == pytest.approx(messages)


def test_a_ring_sums_bucket_by_bucket() -> None:
    slow = Link(1.0, 1e18)
    large = Work(num_ids=10, num_items=10_000, dim=64, num_parameters=84_000_000)  # 336 MB
    few, many = (Cluster(1, size, INSTANT, INSTANT, slow) for size in (2, 1024))
    assert step_seconds(large, ONE, few) == pytest.approx(step_seconds(large, ONE, _instant(few)) + 81 + 1)
    assert step_seconds(large, ONE, many) == pytest.approx(step_seconds(large, ONE, _instant(many)) + (2 + 1) * 1023)


def _instant(cluster: Cluster) -> Cluster:
    return Cluster(cluster.groups, cluster.members, INSTANT, INSTANT, INSTANT)


def test_waiting_lengthens_the_computing() -> None:
    cluster = Cluster(1, 8, INSTANT, INSTANT, INSTANT)
    more = step_seconds(WORK, ONE, cluster, waiting=0.2) - step_seconds(WORK, ONE, cluster)
    assert more == pytest.approx(2.5)


def test_a_machine_is_a_group_and_shares_its_network() -> None:
    links = {"exchange_latency": 1e-4, "exchange_rate": 1e9, "sum_latency": 2e-4, "sum_rate": 2e9}
    settings = {**scaling.SETTINGS, "network_gbps": 8.0}
    small = scaling.cluster_of(4, links, settings)
    assert (small.groups, small.members, small.ring.rate) == (1, 4, 2e9)
    large = scaling.cluster_of(128, links, settings)
    assert (large.groups, large.members, large.across.rate, large.ring.rate) == (16, 8, 1e9 / 8, 1e9)


def fake_ranks(module: str, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    links = {"exchange_latency": 1e-4, "exchange_rate": 1e9, "sum_latency": 2e-4, "sum_rate": 2e9}
    stages = {"fetch": 0.1, "compute": 9.0, "reduce": 0.1, "update": 0.3}
    found = {"seconds": 9.5 + ranks, "stages": stages, "num_parameters": 10**6, "steps": 3, "links": links}
    return {**found, "core_rate": 50.0 - 5.0 * ranks}


def test_the_record_has_the_documented_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "run_as_ranks", fake_ranks)
    record, result = bench.run_benchmark("scaling", ["presets=hstu_tiny", "simulated=8,128"])
    assert record.figures["efficiency_2_hstu_tiny"] == pytest.approx(10.5 / 11.5)
    assert record.figures["cores_2_hstu_tiny"] == pytest.approx(40.0 / 45.0)
    assert 0.5 < record.figures["efficiency_128_simulated_hstu_tiny"] < 1.0
    assert record.figures["simulator_error"] > 0
    assert result.plots.keys() == {"scaling"}
    record, _ = bench.run_benchmark("scaling", ["presets=hstu_large", "simulated=8"])
    assert "simulator_error" not in record.figures  # two ranks are not enough to measure its error
    with pytest.raises(UserError, match=r"unknown 'hstu_tinny'.*Did you mean 'hstu_tiny'"):
        bench.run_benchmark("scaling", ["presets=hstu_tinny"])


def test_a_preset_that_does_not_fit_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(module: str, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
        if options["preset"] == "large" and ranks == 2:
            raise RankKilled("a rank of 2 was killed")
        return fake_ranks(module, ranks, options)

    monkeypatch.setattr(scaling, "run_as_ranks", killed)
    record, result = bench.run_benchmark("scaling", ["presets=hstu_tiny,hstu_large", "simulated=8"])
    assert "efficiency_2_hstu_tiny" in record.figures and "efficiency_2_hstu_large" not in record.figures
    assert "hstu_large is left out: hstu_large on 2 ranks could not be measured: a rank of 2 was killed" in result.notes
    with pytest.raises(
        UserError, match=r"no preset could be measured: hstu_large is left out: .* a rank of 2 was killed"
    ):
        bench.run_benchmark("scaling", ["presets=hstu_large"])


def measure_small() -> dict[str, Any]:
    options = {
        "model": "hstu",
        "preset": "tiny",
        "lengths": [40, 20],
        "num_items": 300,
        "num_negatives": 4,
        "seconds": 0.0,
        "max_steps": 2,
    }
    with connected_world() as world:
        return _scaling_rank.measure(world, options)


def test_real_ranks_report_the_same_stages_and_bandwidth() -> None:
    first, second = run_ranks(2, measure_small)
    assert first == second
    assert first["seconds"] >= sum(first["stages"].values()) * 0.99
    assert first["steps"] == 2 and min(first["links"].values()) > 0 and first["core_rate"] > 0
