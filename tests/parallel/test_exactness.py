"""Any mesh of ranks trains to the weights of one process on the same batches, within fp32 rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.training import train_both_optimizers, train_steps
from turbogr.config import Config, LossConfig

_STEPS = 9


@pytest.fixture(scope="module")
def alone(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_both_optimizers(_config(), store_path, tmp_path_factory.mktemp("alone"), 1, _STEPS)


def _config(**parallel: Any) -> Config:
    from tests.training.conftest import make_config

    config = make_config()
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, check_every=2, **parallel))


@pytest.mark.parametrize(("groups", "members"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_any_mesh_trains_to_the_same_weights(
    groups: int, members: int, alone: dict[str, Any], store_path: Path, tmp_path: Path
) -> None:
    results = run_ranks(groups * members, train_both_optimizers, _config(), store_path, tmp_path, groups, _STEPS)
    for optimizer, one in alone.items():
        many = [result[optimizer] for result in results]
        for name, tensor in one["state"].items():
            np.testing.assert_allclose(many[0]["state"][name], tensor, rtol=1e-5, atol=3e-6, err_msg=name)
        np.testing.assert_allclose(many[0]["losses"], one["losses"], rtol=1e-5)
        for rank, result in enumerate(many):
            assert np.array_equal(result["dense"], many[0]["dense"])
            assert np.array_equal(result["shard"], many[rank % members]["shard"])
            assert result["losses"] == many[0]["losses"]
            assert result["tokens"] == one["tokens"]


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_without_sequences_take_part(groups: int, store_path: Path, tmp_path: Path) -> None:
    config = _config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=3))
    one = train_steps(config, store_path, tmp_path, 1, 4)
    many = run_ranks(4, train_steps, config, store_path, tmp_path, groups, 4)
    for name, tensor in one["state"].items():
        np.testing.assert_allclose(many[0]["state"][name], tensor, rtol=1e-5, atol=3e-6, err_msg=name)
    sizes = set()
    for step, whole in enumerate(one["items"]):
        parts = [result["items"][step] for result in many]
        assert sum(not part for part in parts) == 1, "a rank has nothing"
        assert len({tuple(part) for part in parts}) == 4, "no two ranks have the same items"
        assert sorted(item for part in parts for item in part) == sorted(whole)
        sizes |= {len(part) for part in parts}
    assert len(sizes) > 3, "parts differ in length"


@pytest.mark.parametrize(("precision", "bound"), [("fp16", 2e-3), ("bf16", 1.6e-2)])
def test_half_precision_messages_change_the_loss_little(
    precision: str, bound: float, alone: dict[str, Any], store_path: Path, tmp_path: Path
) -> None:
    """Measured: the loss moves by less than the rounding of a row, replicas stay equal, and it is not fp32."""
    results = run_ranks(4, train_both_optimizers, _config(row_precision=precision), store_path, tmp_path, 2, _STEPS)
    for optimizer, one in alone.items():
        many = [result[optimizer] for result in results]
        losses, exact = np.array(many[0]["losses"])[:, 0], np.array(one["losses"])[:, 0]
        error = np.abs(losses / exact - 1).max()
        assert 1e-6 < error < bound, error
        for rank, result in enumerate(many):
            assert np.array_equal(result["dense"], many[0]["dense"])
            assert np.array_equal(result["shard"], many[rank % 2]["shard"])


@pytest.mark.parametrize(("groups", "members"), [(1, 2), (2, 2)])
def test_ranks_draw_the_negatives_of_one_process(groups: int, members: int, store_path: Path, tmp_path: Path) -> None:
    loss = LossConfig(
        num_negatives=8, sampler="mixture", shares=(0.25, 0.25, 0.25, 0.25), expansion=2, segment_mb=0.001
    )
    config = dataclasses.replace(_config(), loss=loss)
    one = train_steps(config, store_path, tmp_path, 1, _STEPS)
    many = run_ranks(groups * members, train_steps, config, store_path, tmp_path, groups, _STEPS)
    np.testing.assert_allclose(many[0]["losses"], one["losses"], rtol=1e-5)
    for name, tensor in one["state"].items():
        np.testing.assert_allclose(many[0]["state"][name], tensor, rtol=1e-5, atol=3e-6, err_msg=name)


def test_steps_planned_for_three_ranks_train_to_the_same_weights_on_two(store_path: Path, tmp_path: Path) -> None:
    config = _config()
    data = dataclasses.replace(config.data, batch_size=6, batch_tokens=None, plan_ranks=3, plan_window=2)
    config = dataclasses.replace(config, data=data)
    one = train_steps(config, store_path, tmp_path, 1, 4)
    many = run_ranks(2, train_steps, config, store_path, tmp_path, 1, 4)
    for name, tensor in one["state"].items():
        np.testing.assert_allclose(many[0]["state"][name], tensor, rtol=1e-5, atol=3e-6, err_msg=name)
