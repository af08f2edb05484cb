"""A silent change of numbers is noticed: losses are those recorded, by backend, instruction set and precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.recorded_losses import CASES, NUM_STEPS, RECORDED, losses, ways

CURVES: dict[str, dict[str, list[float]]] = json.loads(RECORDED.read_text())
_TOLERANCE = 1e-5  # other machines and libraries round differently; on one, all ways are within a quarter of it


@pytest.mark.parametrize(("model", "precision"), CASES)
def test_losses_are_those_recorded_and_do_not_depend_on_threads(model: str, precision: str, tmp_path: Path) -> None:
    recorded = CURVES[f"{model} {precision}"]
    threads = torch.get_num_threads()
    for way in ways():
        curves = []
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                curves.append(losses(model, precision, way, tmp_path / way.replace(" ", "-")))
        finally:
            torch.set_num_threads(threads)
        assert curves[0] == curves[1], f"{way}: bit for bit with one thread or three"
        assert len(recorded[way]) == NUM_STEPS
        assert curves[0] == pytest.approx(recorded[way], rel=_TOLERANCE), way


def test_all_ways_of_computing_agree() -> None:
    """They differ by rounding alone; every instruction set has been recorded."""
    for name, curves in CURVES.items():
        assert curves.keys() == {"reference", "cpu avx512", "cpu avx2", "cpu generic"}
        for way, curve in curves.items():
            assert curve == pytest.approx(curves["reference"], rel=_TOLERANCE), (name, way)
            assert curve[-1] < curve[0], "it learns"
