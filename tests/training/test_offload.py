"""Training with the item table in host memory beside an accelerator, which is simulated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.negatives.batches import make_batch
from tests.simulated_device import DEVICE, MEMORY, OnDevice, SimulatedCopies, SimulatedDevice, simulate
from turbogr import ops
from turbogr.config import Config, LossConfig
from turbogr.data.store import Store
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.run import train as run
from turbogr.training.step import Stepper

NUM_ITEMS = 3000


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    simulate(monkeypatch)
    with ops.backend("reference"):
        yield


def train(config: Config, device: torch.device) -> tuple[Stepper, list[float], torch.Tensor]:
    """Two steps: the stepper, the losses, and the last gradients of the rows."""
    stepper = Stepper(config, NUM_ITEMS, device=device, mesh=Mesh(World()))
    losses = []
    for step in range(2):
        batch = stepper.prepare(make_batch([9, 1, 14, 16, 16], NUM_ITEMS, step), step)
        fetched = stepper.fetch(batch)
        loss = stepper.compute(batch, fetched, step)
        rows = stepper.reduce(fetched)
        measured = stepper.measure(loss, rows)
        grad = rows[0].grad.clone()
        stepper.update(rows, measured.grad_norm, 1.0)
        losses.append(measured.loss)
    return stepper, losses, grad


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"precision": "fp16", "expansion": 2},
        {"precision": "int8", "expansion": 3, "sharing": "positions", "sampler": "in-batch"},
    ],
    ids=["plain", "group", "positions"],
)
def test_steps_take_rows_from_host_memory_and_give_gradients_back(loss: dict[str, Any], config: Config) -> None:
    config = dataclasses.replace(config, loss=LossConfig(num_negatives=8, segment_mb=0.02, **loss))
    stepper, losses, grad = train(config, torch.device("cpu"))
    assert not SimulatedCopies.posts
    with SimulatedDevice():
        other, found, other_grad = train(config, DEVICE)
    assert SimulatedCopies.posts > 20
    assert not isinstance(other.tables.weights[0], OnDevice) and other.tables.weights[0].device.type == "cpu"
    assert all(isinstance(parameter, OnDevice) for parameter in other.model.parameters())
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other_grad, grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other.tables.weights[0], stepper.tables.weights[0], rtol=1e-3, atol=1e-4)


def test_a_whole_run_learns_and_evaluates_the_same(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LossConfig(num_negatives=8, segment_mb=0.02, precision="fp16")
    short = dataclasses.replace(config.train, epochs=1, log_every=1, backend="reference")
    config = dataclasses.replace(config, loss=loss, train=short)
    run(config, store.path, tmp_path / "cpu")
    assert not SimulatedCopies.posts
    monkeypatch.setattr("turbogr.training.run.choose_device", lambda *args: DEVICE)
    with SimulatedDevice():
        assert run(config, store.path, tmp_path / "device").status == "finished"
    assert SimulatedCopies.posts
    for wanted, found in zip(*(logged(tmp_path / name) for name in ("cpu", "device")), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


def logged(path: Path) -> list[float]:
    """Losses of the steps and the metric that selects the best checkpoint."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    found = [record[key] for record in records for key in ("loss", "hr@10", "ndcg@10") if key in record]
    assert len(found) > 4, records
    return found


def test_the_device_holds_no_more_for_more_negatives(config: Config) -> None:
    peaks = {}
    for segment_mb in (0.4, None):
        for num_negatives in (32, 512):
            loss = LossConfig(num_negatives=num_negatives, segment_mb=segment_mb, precision="fp16")
            with SimulatedDevice():
                before = MEMORY.peak = MEMORY.live
                train(dataclasses.replace(config, loss=loss), DEVICE)
            peaks[segment_mb, num_negatives] = MEMORY.peak - before
    assert peaks[0.4, 512] < peaks[0.4, 32] + 100_000, peaks
    assert peaks[None, 512] > peaks[None, 32] + 1_000_000, peaks
    assert peaks[0.4, 32] + 3 * 4 * NUM_ITEMS * 16 < peaks[None, 32], "nor the table and its moments"


def test_an_encoder_takes_what_it_needs_of_a_table_in_host_memory(config: Config) -> None:
    config = dataclasses.replace(config, loss=LossConfig(num_negatives=8, segment_mb=0.4))
    batch = make_batch([3, 7], NUM_ITEMS)
    stepper = Stepper(config, NUM_ITEMS, device=torch.device("cpu"), mesh=Mesh(World()))
    wanted = stepper.task.encoder(stepper.tables.gather_all())
    with SimulatedDevice():
        stepper = Stepper(config, NUM_ITEMS, device=DEVICE, mesh=Mesh(World()))
        found = stepper.task.encoder(stepper.tables.gather_all())
        vectors = [found.encode_last(batch), found.item_rows(2, 9)]
        assert all(isinstance(some, OnDevice) for some in vectors)
        torch.testing.assert_close(vectors[0].cpu(), wanted.encode_last(batch))
        torch.testing.assert_close(vectors[1].cpu(), wanted.item_rows(2, 9))
