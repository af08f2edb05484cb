"""The profile of a step: every operator by name, adding up to the step, and no trace in what is trained."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.training.operator_times import OTHERS, OUTSIDE, Profiler
from turbogr.training.run import train


def test_operators_are_distinguished_and_add_up_to_the_whole() -> None:
    x = torch.randn(300, 300, requires_grad=True)
    profiler = Profiler()
    started = time.perf_counter()
    for _ in range(2):
        with profiler:
            (x @ x).relu().sum().backward()
            time.sleep(0.01)
    elapsed = 1e3 * (time.perf_counter() - started)
    parts = profiler.milliseconds()
    assert profiler.steps == 2
    assert {"mm", "relu", "threshold_backward"} <= parts.keys()
    assert parts[OUTSIDE] >= 10
    assert sum(parts.values()) == pytest.approx(elapsed / 2, rel=0.1)


def test_only_the_largest_have_a_line_of_their_own() -> None:
    x = torch.rand(10)
    names = ["sin", "cos", "tan", "exp", "log", "sqrt", "neg", "abs", "ceil", "floor", "round", "sign", "erf", "tanh"]
    with (profiler := Profiler()):
        for name in names:
            getattr(torch, name)(x)
    parts = profiler.milliseconds()
    assert len(parts.keys() - {OTHERS, OUTSIDE}) == 12
    assert parts[OTHERS] > 0


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), Profiler():
        raise ZeroDivisionError


def test_training_writes_a_profile_unless_switched_off(config: Config, store: Store, tmp_path: Path) -> None:
    losses = []
    for profile in (True, False):
        settings = dataclasses.replace(config, train=dataclasses.replace(config.train, profile=profile, epochs=4))
        run = tmp_path / f"run-{profile}"
        train(settings, data=store.path, out=run)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
        assert (run / "profile.json").exists() is profile
    assert losses[0] == losses[1]
    profile = json.loads((tmp_path / "run-True" / "profile.json").read_text())
    assert profile["steps"] == 5
    assert len(profile["milliseconds"]) > 5 and OUTSIDE in profile["milliseconds"]
