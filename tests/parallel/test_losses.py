"""Every built-in loss, and skipped targets, on sharded tables and in every mode: two ranks learn what one does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.test_pipeline import train_all_modes
from tests.training.test_losses import LOSSES
from tests.training.test_pipeline import sparse
from turbogr.config import Config


@pytest.mark.parametrize(("name", "groups"), [("full-softmax", 1), ("full-softmax", 2), ("bce", 2), ("gbce", 1)])
def test_modes_and_ranks_learn_the_same(
    name: str, groups: int, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(sparse(config), loss=LOSSES[name])
    assert_modes_and_ranks_agree(config, store_path, tmp_path, groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_repeated_targets_are_skipped_alike_in_all_modes_and_on_all_ranks(
    groups: int, config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = sparse(config)
    loss = dataclasses.replace(config.loss, num_negatives=4, sampler="mixture", shares=(0.5, 0.0, 0.5, 0.0))
    skipping = dataclasses.replace(config.data, repeated_targets="skip")
    all_targets = train_all_modes(dataclasses.replace(config, loss=loss), store_path, tmp_path, 1)
    one = assert_modes_and_ranks_agree(
        dataclasses.replace(config, loss=loss, data=skipping), store_path, tmp_path, groups
    )
    weight = "tables.item.weight"
    assert not np.allclose(one["serial"]["state"][weight], all_targets["serial"]["state"][weight], atol=1e-2)


def assert_modes_and_ranks_agree(config: Config, store_path: Path, tmp_path: Path, groups: int) -> dict[str, Any]:
    """Train in every mode on one rank and on two, compare, and return what one rank has learnt."""
    one = train_all_modes(config, store_path, tmp_path, 1)
    first, second = run_ranks(2, train_all_modes, config, store_path, tmp_path, groups)
    for key, tensor in first["serial"]["state"].items():
        assert np.array_equal(first["sync"]["state"][key], tensor), key
        assert np.array_equal(first["exact_overlap"]["state"][key], tensor), key
        assert np.array_equal(first["semi_async"]["state"][key], first["semi_async inline"]["state"][key]), key
        for mode in ("serial", "semi_async"):
            wanted = one[mode]["state"][key]
            np.testing.assert_allclose(first[mode]["state"][key], wanted, rtol=2e-3, atol=3e-4, err_msg=key)
    for mode, result in second.items():
        for key, tensor in result["state"].items():
            assert np.array_equal(tensor, first[mode]["state"][key]), (mode, key)
    return one
