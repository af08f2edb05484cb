"""A rank that is slower than planned is named with what it costs; noise, and more work by plan, are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from turbogr.training import stragglers
from turbogr.training.stragglers import StragglerReport, StragglerWatch, describe_stragglers

HOSTS = ["a", "b", "c", "d"]


def watch(speeds: list[float]) -> StragglerWatch:
    return StragglerWatch(HOSTS[: len(speeds)], speeds, balances=True)


def noisy(num_steps: int, costs: NDArray[Any], seed: int, fixed: float = 0.1) -> NDArray[Any]:
    """Seconds [steps, ranks]: a fixed part and the cost, with jitter of 10 %, and one step in ten twice as long."""
    random = np.random.default_rng(seed)
    seconds = (fixed + costs) * random.lognormal(0.0, 0.1, (num_steps, costs.shape[-1]))
    return np.where(random.random(seconds.shape) < 0.1, 2 * seconds, seconds)


def reports(found: StragglerWatch, seconds: NDArray[Any], costs: NDArray[Any]) -> list[tuple[int, StragglerReport]]:
    loads = np.stack([seconds, np.broadcast_to(costs, seconds.shape)], axis=2)
    answers = [(step, found.add(load)) for step, load in enumerate(loads)]
    return [(step, report) for step, report in answers if report is not None]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 1.0, 0.5, 1.0]])
def test_noise_and_a_plan_of_unequal_costs_are_no_stragglers(speeds: list[float], seed: int) -> None:
    random = np.random.default_rng(seed)
    equal = np.ones((1500, len(speeds)))
    unequal = random.lognormal(0.0, 0.7, equal.shape)
    for costs in (equal, unequal, unequal * (random.random(equal.shape) < 0.9)):
        seconds = noisy(1500, costs / speeds if costs is equal else costs, seed)
        assert not reports(watch(speeds if costs is equal else [1.0] * len(speeds)), seconds, costs * 3.7)


def test_a_slow_moment_is_not_reported() -> None:
    seconds = noisy(400, np.ones((400, 2)), seed=1)
    seconds[100:140, 1] *= 3
    assert not reports(watch([1.0, 1.0]), seconds, np.ones(2))


@pytest.mark.parametrize("slowdown", [1.4, 3.0])
@pytest.mark.parametrize("size", [2, 4])
def test_a_slow_rank_is_named_once_with_its_share_and_speeds(size: int, slowdown: float) -> None:
    seconds = noisy(2000, np.ones((2000, size)), seed=2)
    seconds[500:1500, 1] *= slowdown
    (began, report), (ended, over) = reports(watch([1.0] * size), seconds, np.ones(size))
    assert 500 < began <= 600 and 1500 < ended <= 1600
    (slow,) = report.slow
    assert (slow.rank, slow.host) == (1, "b") and slow.slowdown == pytest.approx(slowdown, rel=0.1)
    assert report.speeds == pytest.approx([1.0, 1 / slowdown, 1.0, 1.0][:size], rel=0.1)
    window = seconds[began - 59 : began + 1]
    longest = window.max(axis=1)
    waits, for_it = (longest[:, None] - window).sum(axis=1), window.argmax(axis=1) == 1
    assert slow.share_of_waiting == pytest.approx(waits[for_it].sum() / waits.sum())
    assert 0.0 < slow.share_of_step < 1.0 - 1.0 / (2.1 * slowdown)
    text = ",".join(f"{speed:g}" for speed in report.speeds)
    assert f"rank 1 on b takes {slow.slowdown:.2g} times" in str(report) and f"parallel.speeds=[{text}]" in str(report)
    assert not over.slow and "no rank is slower than planned any more" in str(over)


def test_speeds_that_fit_end_the_report() -> None:
    """With the proposed speeds the plan gives the slow rank less to do, and nothing is left to report."""
    (_, report), *_ = reports(watch([1.0, 1.0]), noisy(200, np.array([[1.0, 2.0]] * 200), seed=3), np.ones(2))
    share = np.array(report.speeds) / sum(report.speeds) * 2
    assert not reports(watch(list(report.speeds)), noisy(2000, np.array([share * [1.0, 2.0]] * 2000), seed=4), share)


def test_a_window_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a millisecond: a disturbance of a second is some thousand steps."""
    seconds = noisy(8_000, np.full((8_000, 2), 0.001), seed=5, fixed=0.0)
    seconds[3000:6000, 1] *= 3
    assert not reports(watch([1.0, 1.0]), seconds, np.ones(2))
    monkeypatch.setattr(stragglers, "_SECONDS", 0.1)
    assert reports(watch([1.0, 1.0]), seconds, np.ones(2))


def test_steps_that_were_not_measured_do_not_count() -> None:
    seconds = np.zeros((1000, 2))
    assert not reports(watch([1.0, 1.0]), seconds, np.ones(2))


def test_a_record_is_a_sentence_again() -> None:
    seconds = noisy(200, np.array([[1.0, 2.0]] * 200), seed=3)
    (_, report), *_ = reports(watch([1.0, 1.0]), seconds, np.ones(2))
    sentence = describe_stragglers({"step": 1200, **report.to_record()})
    assert sentence.startswith("Since step 1,200 rank 1 took ") and "times as long as planned (" in sentence
    assert describe_stragglers({"step": 3, "ranks": []}) == "Since step 3 no rank was slower than planned."
    assert describe_stragglers({"step": 3, "ranks": [{}]}) == ""
