"""A few steps of each model on Triton's kernels, in the interpreter: the losses of the CPU's kernels.

Dropout and negatives are on: with other random numbers nothing would agree beyond the first digits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.ops.judging import needs_kernels
from tests.training.test_pipeline import sparse, trainer_of
from turbogr import ops
from turbogr.config import Config, LossConfig
from turbogr.data.store import Store
from turbogr.ops import triton_runtime

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(triton_runtime.BACKEND.problem is not None, reason=str(triton_runtime.BACKEND.problem)),
]

STEPS = 2
LOSS = {"num_negatives": 4, "sampler": "popularity"}


def config_of(config: Config, model: str, loss: dict[str, Any]) -> Config:
    config = sparse(config)
    sizes = dataclasses.replace(config.model, name=model, dropout=0.3, num_blocks=1)
    return dataclasses.replace(config, model=sizes, loss=LossConfig(**loss))


def train_steps(config: Config, store: Store, run: Path, backend: str) -> list[float]:
    """The losses of a few steps, each but the first after an update of all weights."""
    losses = []
    with ops.backend(backend):
        trainer = trainer_of(config, store, run)
        stepper = trainer.stepper
        for step in range(STEPS):
            batch = stepper.prepare(trainer.loader.batch(0, step), step)
            request = trainer.tables.receive_ids(trainer.tables.send_ids(stepper.ids(batch)))
            sets = trainer.tables.working_sets(request, trainer.tables.fetch_rows(request.requests))
            loss = stepper.compute(batch, sets, step)
            rows = stepper.reduce(sets)
            measured = stepper.measure(loss, rows)
            losses.append(float(loss.detach()))
            stepper.update(rows, measured.grad_norm, 1.0)
            stepper.drop_gradients()
    return losses


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("hstu", {**LOSS, "expansion": 2, "precision": "fp16"}),
        ("fuxi-alpha", LOSS),
        ("fuxi-beta", {"name": "full-softmax"}),
        ("sasrec", {**LOSS, "name": "bce"}),
        ("stu", LOSS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_learns_what_it_does_on_the_cpu_s_kernels(
    model: str, loss: dict[str, Any], config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = config_of(config, model, loss)
    wanted = train_steps(config, store, tmp_path / "cpu", "cpu")
    found = train_steps(config, store, tmp_path / "triton", "triton")
    assert found == pytest.approx(wanted, rel=5e-6)
    assert abs(wanted[1] - wanted[0]) > 1e-3, "the second loss is that after an update"
