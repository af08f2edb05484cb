"""Rows that are only negatives are sent between ranks in half precision where the loss reads them so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.parallel.training import make_trainer, whole_state
from tests.training.test_pipeline import sparse, train_epochs, with_pipeline
from turbogr.config import Config, LossConfig
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.parallel import row_encoding, sharded_table
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.row_exchange import start_exchange
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.parallel.world import connected_world


def with_precision(config: Config, precision: str) -> Config:
    data = dataclasses.replace(config.data, batch_size=12)
    return dataclasses.replace(config, data=data, loss=LossConfig(num_negatives=6, precision=precision))  # type: ignore[arg-type]


def train_in_modes(config: Config, store: Path, run: Path) -> dict[str, Any]:
    """Train an epoch with each precision, and with fp16 in other modes; return weights, and bytes of fp16 sent."""
    results: dict[str, Any] = {}
    with connected_world() as world:
        for name, precision, options in [
            ("fp32", "fp32", {"depth": 1}),
            ("fp16", "fp16", {"depth": 1}),
            ("exact_overlap", "fp16", {"mode": "exact_overlap"}),
        ]:
            messages: list[Any] = []

            def start(message: torch.Tensor, sent: torch.Tensor, *rest: Any, messages: list[Any] = messages) -> Any:
                messages.append((sent.dtype, sent.nbytes))
                return start_exchange(message, sent, *rest)

            trainer = make_trainer(with_pipeline(with_precision(config, precision), **options), store, run, world)
            with mock.patch.object(sharded_table, "start_exchange", start):
                train_epochs(trainer, 1)
            halves = sum(size for kind, size in messages if kind == torch.float16)
            weights = {key: tensor.numpy() for key, tensor in whole_state(trainer).items()}
            results[name] = {"weights": weights, "halves": halves, "bytes": sum(size for _, size in messages)}
    return results


def test_weights_are_those_of_exact_rows_up_to_rounding_and_the_same_in_every_mode(
    config: Config, store_path: Path, tmp_path: Path
) -> None:
    first, second = run_ranks(2, train_in_modes, sparse(config), store_path, tmp_path)
    assert not first["fp32"]["halves"] and first["fp16"]["halves"] > 0
    assert first["fp16"]["bytes"] < first["fp32"]["bytes"]
    for name, tensor in first["fp16"]["weights"].items():
        assert np.array_equal(tensor, first["exact_overlap"]["weights"][name]), name
        assert np.array_equal(tensor, second["fp16"]["weights"][name]), name
    weight = "tables.item.weight"
    assert first["fp16"]["weights"][weight] == pytest.approx(first["fp32"]["weights"][weight], abs=0.02)


def send_some(width: int) -> dict[str, Any]:
    """Fetch 3 rows exactly and 400 as negatives; return the bytes of the messages and how far rows are off."""
    with connected_world() as world:
        mesh = Mesh.build(world, choose_mesh(world.size, world.size, groups=1), "cpu")
        table = ShardedTable(1000, width, mesh)
        table.draw(0, 1000, seed=3)
        whole = table.gather(0, 1000)
        inputs, negatives = torch.tensor([5, 700, 701]), torch.arange(world.rank, 1000, 5)[:400]
        found = {}
        for name, rounded in (("whole", [False, False]), ("half", [False, True])):
            request = table.receive_ids(table.send_ids([inputs, negatives], None, rounded))
            pending = table.send_rows(request)
            sent = pending.sent.nbytes + (pending.rounded.sent.nbytes if pending.rounded else 0)
            rows = table.receive_rows(pending)[request.index.long()]
            exact = torch.cat([inputs, negatives])
            found[name] = {
                "bytes": sent,
                "inputs": torch.equal(rows[:3], whole[inputs]),
                "error": float((rows - whole[exact]).abs().max() / whole.abs().max()),
            }
        return found


def test_rows_that_are_only_negatives_take_half_the_bytes_and_others_are_exact() -> None:
    for found in run_ranks(2, send_some, 64):
        whole, half = found["whole"], found["half"]
        assert whole["inputs"] and half["inputs"] and whole["error"] == 0.0
        assert 0.0 < half["error"] <= 2.0**-11
        assert half["bytes"] < 0.54 * whole["bytes"], "and three columns for the length"


def test_what_is_read_in_half_precision_is_not_changed_by_the_message() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 48, generator=random) * 10.0 ** torch.linspace(-9, 9, 300)[:, None]
    rows[7] = 0.0
    found = row_encoding.decode_units(row_encoding.encode_units(rows))
    assert torch.equal(unit(found).half(), unit(rows).half())
    torch.testing.assert_close(found.norm(dim=1), rows.norm(dim=1), rtol=1e-3, atol=0.0)
    damaged = row_encoding.decode_units(row_encoding.encode_units(torch.tensor([[1.0, float("nan")], [1.0, 2.0]])))
    assert not damaged[0].isfinite().any() and damaged[1].isfinite().all()
