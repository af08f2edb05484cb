from __future__ import annotations

import numpy as np
import pytest
import torch

from turbogr.config import Config, ModelConfig, resolve
from turbogr.train.calibration import calibration_shapes, measure_cost


@pytest.mark.parametrize("max_len", [1, 2, 50, 512, 8192])
def test_shapes_tell_the_coefficients_apart(max_len: int) -> None:
    shapes = calibration_shapes(max_len)
    assert all(lengths.min() >= 1 and lengths.max() <= max_len for lengths in shapes)
    assert max(lengths.max() for lengths in shapes) == max_len
    design = np.array([(1.0, lengths.sum(), np.square(lengths).sum()) for lengths in shapes])
    assert np.linalg.matrix_rank(design / design.max(axis=0)) == (3 if max_len > 2 else min(3, len(shapes)))


def test_a_small_model_is_measured() -> None:
    model = ModelConfig(dim=16, num_blocks=1, num_heads=2, max_len=64)
    config = resolve(Config(model=model), num_items=50, num_sequences=10, typical_length=64, longest_length=64)
    state = torch.get_rng_state()
    cost = measure_cost(config, 50, device=torch.device("cpu"), repeats=2)
    assert torch.equal(torch.get_rng_state(), state), "a run's random numbers do not depend on the measurement"
    assert cost.cost(np.array([64]))[0] > 0
    assert 0 < cost.step_cost(np.full(8, 64)) < 60
