"""Every way to draw and score negatives, on sharded tables and in every mode of updates: all ends agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.test_pipeline import train_all_modes
from tests.training.test_objectives import OBJECTIVES
from tests.training.test_pipeline import sparse
from turbogr.config import Config, LossConfig

_DELAY = 8  # batches are drawn up to 6 steps ahead


def train_with_early_lists(config: Config, store: Path, run: Path, groups: int) -> dict[str, Any]:
    """Hard negatives come into use soon enough for a short run."""
    with (
        mock.patch("turbogr.config.schema.HARD_DELAY", _DELAY),
        mock.patch("turbogr.negatives.hard.HARD_DELAY", _DELAY),
    ):
        return train_all_modes(config, store, run, groups)


@pytest.mark.parametrize(
    ("name", "groups", "members"), [("everything", 1, 2), ("everything", 2, 1), ("positions", 1, 2), ("logits", 2, 1)]
)
def test_modes_and_ranks_draw_and_learn_the_same(
    name: str, groups: int, members: int, config: Config, store_path: Path, tmp_path: Path
) -> None:
    loss = LossConfig(num_negatives=8, **{**OBJECTIVES[name], "hard_every": _DELAY})
    config = dataclasses.replace(sparse(config), loss=loss)
    one = train_with_early_lists(config, store_path, tmp_path, 1)
    first, *others = run_ranks(groups * members, train_with_early_lists, config, store_path, tmp_path, groups)
    assert "task.newest" not in one["serial"]["state"] or int(one["serial"]["state"]["task.newest"]) > 0
    for key, tensor in first["serial"]["state"].items():
        assert np.array_equal(first["sync"]["state"][key], tensor), key
        assert np.array_equal(first["exact_overlap"]["state"][key], tensor), key
        assert np.array_equal(first["semi_async"]["state"][key], first["semi_async inline"]["state"][key]), key
        for mode in ("serial", "semi_async"):
            # The last bit of a sum can decide how a negative is rounded to 16 or 8 bits.
            wanted = one[mode]["state"][key]
            np.testing.assert_allclose(first[mode]["state"][key], wanted, rtol=2e-3, atol=3e-4, err_msg=key)
    for rank in others:
        for mode, result in rank.items():
            assert np.array_equal(result["state"]["tables.item.weight"], first[mode]["state"]["tables.item.weight"])
