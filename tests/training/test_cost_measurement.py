from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml

from turbogr.config import Config, ModelConfig, dump_config, parse, resolve
from turbogr.training.cost_measurement import calibration_shapes, measure_cost, with_measured_cost


@pytest.mark.parametrize("max_len", [1, 2, 50, 512, 8192])
def test_shapes_tell_the_coefficients_apart(max_len: int) -> None:
    shapes = calibration_shapes(max_len)
    assert all(lengths.min() >= 1 and lengths.max() <= max_len for lengths in shapes)
    assert max(lengths.max() for lengths in shapes) == max_len
    design = np.array([(1.0, lengths.sum(), np.square(lengths).sum()) for lengths in shapes])
    assert np.linalg.matrix_rank(design / design.max(axis=0)) == (3 if max_len > 2 else min(3, len(shapes)))


@pytest.fixture
def config() -> Config:
    model = ModelConfig(dim=16, num_blocks=1, num_heads=2, max_len=64)
    return resolve(Config(model=model), num_items=50, num_sequences=10, typical_length=64, longest_length=64)


def test_a_small_model_is_measured(config: Config) -> None:
    state = torch.get_rng_state()
    cost = measure_cost(config, 50, device=torch.device("cpu"), repeats=2)
    assert torch.equal(torch.get_rng_state(), state), "a run's random numbers do not depend on the measurement"
    assert cost.cost(np.array([64]))[0] > 0
    assert 0 < cost.step_cost(np.full(8, 64)) < 60


def test_a_cost_is_measured_only_where_none_is_given(config: Config) -> None:
    measured = with_measured_cost(config, 50, device=torch.device("cpu"))
    assert measured.parallel.cost is not None and max(measured.parallel.cost) > 0
    assert load(measured) == measured
    assert with_measured_cost(measured, 50, device=torch.device("meta")) is measured


def load(config: Config) -> Config:
    return parse(Config, yaml.safe_load(dump_config(config)), "stored")
