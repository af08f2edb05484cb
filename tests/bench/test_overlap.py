"""`bench overlap`: its arithmetic, and real ranks on a tiny case."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.ranks import run_ranks
from turbogr import bench
from turbogr.bench import _overlap_rank, overlap
from turbogr.errors import UserError
from turbogr.parallel.world import World, connected_world

TINY = {
    **overlap.SETTINGS,
    "models": ["tiny"],
    "modes": list(_overlap_rank.PIPELINES),
    "sequences": 2,
    "length": 16,
    "num_items": 2000,
    "num_negatives": 2,
    "seconds": 0.1,
    "min_steps": 2,
    "max_steps": 3,
}
LARGE = {**TINY, "warm_steps": 1, "min_steps": 2, "max_steps": 2}


def step(**changes: float) -> dict[str, float]:
    usual = {
        "seconds": 2.0,
        "exposed_sparse": 0.25,
        "exposed_dense": 0.125,
        "skew": 0.0625,
        "idle": 0.0625,
        "dim": 64.0,
    }
    usual |= {"main_cpu": 0.75, "other_cpu": 0.25}
    return {**usual, "rows_requested": 1e6, "rows_read": 1e6, "rows_shared": 2e5, **changes}


def test_the_demand_is_the_time_on_the_link_over_that_of_computing() -> None:
    modes = [step(rows_requested=0.0), step(), step(seconds=1.0)]
    # a million rows of 256 bytes, half of them from the other node, as vectors and as gradients; half of 2 s computes
    assert overlap.link_demand(modes, 2, 1000) == pytest.approx(1e6 * 256 * 8 / 1e9)
    assert overlap.link_demand(modes, 4, 2000) == pytest.approx(1e6 * 256 * 8 / 1e9)
    assert overlap.collision_rate(step()) == pytest.approx(0.2)


def test_unknown_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"unknown 'smal'.*Did you mean 'small'"):
        bench.run_benchmark("overlap", ["models=smal"])


def test_the_largest_model_has_few_steps_and_can_be_left_out() -> None:
    *usual, slow, fast = overlap._cases({**overlap.SETTINGS})
    assert all("large" not in case["models"] for _, _, case in usual)
    assert [case[:2] for case in (slow, fast)] == [(2, 2000), (2, 8000)]
    for case in (slow[2], fast[2]):
        # about 3.7 s a step on two cores: with four modes, one step to warm up and one read ahead, two minutes
        assert case["models"] == ["large"] and case["warm_steps"] + case["max_steps"] + 1 == 4
    left = list(overlap._cases({**overlap.SETTINGS, "large_model": ""}))
    assert [case[:2] for case in left] == [case[:2] for case in usual]


def measure(options: dict[str, Any]) -> dict[str, Any]:
    with connected_world() as world:
        return _overlap_rank.measure(world, options)


@pytest.mark.parametrize("options", [TINY, LARGE], ids=["tiny", "few steps"])
def test_ranks_measure_every_mode(options: dict[str, Any]) -> None:
    found = run_ranks(2, measure, options)
    assert found[0] == found[1]
    for mode, result in found[0]["tiny"].items():
        assert result["seconds"] > 0.0 and result["exposed_sparse"] >= 0.0 and result["skew"] > 0.0
        assert 0.0 < overlap.compute_share(result) < 1.0 and result["main_cpu"] > 0.0
        assert (result["rows_read"] > 0.0) == (mode in ("semi_async", "exact_overlap"))
        assert (result["rows_requested"] > 0.0) == (mode != "serial")
    assert found[0]["tiny"]["serial"]["exposed_sparse"] > 0.0


def test_the_cost_of_the_pipeline_is_measured_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def fake(world: World, model: str, mode: str, options: dict[str, Any]) -> dict[str, float]:
        measured.append(mode)
        return {"seconds": 1.05 if mode == "pipeline" else 1.0}

    monkeypatch.setattr(_overlap_rank, "_steps", fake)
    assert _overlap_rank.measure(World(), TINY) == {"tiny": pytest.approx(0.05)}
    assert measured[:4] == ["pipeline", "serial", "serial", "pipeline"]


def test_the_record_has_the_documented_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(module: str, ranks: int, options: dict[str, Any], network: Any = None) -> dict[str, Any]:
        if ranks == 1:
            return {"tiny": 0.004, "small": 0.002}
        return {model: {mode: step() for mode in options["modes"]} for model in options["models"]}

    monkeypatch.setattr(overlap, "run_as_ranks", fake)
    record, result = bench.run_benchmark("overlap", [])
    for mode in _overlap_rank.PIPELINES:
        assert record.figures[f"exposed_sparse_share_{mode}"] == 0.25
        assert record.figures[f"compute_share_{mode}"] == 0.5
        assert record.figures[f"step_speedup_{mode}"] == 1.0
        assert record.figures[f"skew_share_{mode}"] == 0.0625
        assert f"exposed_sparse_share_{mode}_tiny_500_4" in record.figures
    assert record.figures["collision_rate"] == pytest.approx(0.2)
    assert record.figures["single_process_overhead"] == 0.004
    assert record.figures["exposed_sparse_share_exact_overlap_items_1000000"] == 0.25
    grid, headline, catalogues = result.tables
    assert len(grid.rows) == 2 * 3 * 3 * 4 + 2 * 4 and len(headline.rows) == 4
    assert [row[:3] for row in grid.rows[-8::4]] == [["large", 2, 2000], ["large", 2, 8000]]
    assert "exposed_sparse_share_semi_async_large_8000_2" in record.figures
    assert [row[0] for row in catalogues.rows] == [10_000, 100_000, 1_000_000]
    assert "<svg" in result.plots["overlap"]
