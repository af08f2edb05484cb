"""How many rows consecutive batches of a data set share, and how much of the gradient falls on popular rows.

Claim: consecutive batches share few rows, so the bounds of `semi_async` are small and `exact_overlap` waits little.
Compared with: nothing; counts on a prepared store while training some steps.
Keys: `alpha`, `alpha_eff`, `collision_rate`, `input_collision_rate`, `rows_per_batch`.

`alpha` is the share of batches that read the most popular row. `alpha_eff` is the mean of that share over all rows,
weighted by their squared gradients; the bounds of `semi_async` depend on it. `collision_rate` is the share of a batch's
rows that the previous batch read too, `input_collision_rate` the share that is also among its inputs; `exact_overlap`
waits for those.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbogr import ops
from turbogr.bench.record import Result
from turbogr.config import Config, load_config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.training.run import resolve_against
from turbogr.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "data": "",  # folder of a prepared store
    "recipe": "",  # a recipe; empty: the defaults
    "steps": 200,
}


class Reads:
    """Counts over batches: which rows are read, and how large their gradients are."""

    def __init__(self, num_rows: int) -> None:
        self.batches, self.rows_read, self.rows_shared, self.inputs_shared = 0, 0, 0, 0
        self._counts = torch.zeros(num_rows, dtype=torch.float64)
        self._squares = torch.zeros(num_rows, dtype=torch.float64)
        self._before: Tensor | None = None

    def add(self, ids: Tensor, grad: Tensor, inputs: Tensor) -> None:
        """Count a batch with distinct rows `ids` [R] and their gradients [R, d]; `inputs` may repeat rows."""
        self.batches += 1
        self._counts[ids] += 1.0
        self._squares[ids] += grad.double().square().sum(1)
        now = self._flags(ids)
        if self._before is not None:
            self.rows_read += ids.numel()
            self.rows_shared += int((now & self._before).sum())
            self.inputs_shared += int((self._flags(inputs) & self._before).sum())
        self._before = now

    def _flags(self, rows: Tensor) -> Tensor:
        flags = torch.zeros(self._counts.shape, dtype=torch.bool)
        flags[rows] = True
        return flags

    def figures(self) -> dict[str, float]:
        shares = self._counts / self.batches
        return {
            "alpha": float(shares.max()),
            "alpha_eff": float((shares * self._squares).sum() / self._squares.sum()),
            "collision_rate": self.rows_shared / max(1, self.rows_read),
            "input_collision_rate": self.inputs_shared / max(1, self.rows_read),
            "rows_per_batch": float(self._counts.sum()) / self.batches,
        }


def run(settings: Mapping[str, Any]) -> Result:
    """Train and count."""
    if not settings["data"]:
        raise UserError("bench collisions needs a prepared store; give it with --set data=DIR")
    config = load_config(settings["recipe"]) if settings["recipe"] else Config()
    store = Store.open(settings["data"])
    ops.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        config = resolve_against(config, store)
        trainer = Trainer(config, store, Path(folder), device=torch.device("cpu"), peak_flops=None)
        reads = _count(trainer, settings["steps"])
    note = f"{reads.batches} batches of {config.data.batch_size or config.data.batch_tokens} from {store.path}"
    return Result(reads.figures(), [], {}, [note])


def _count(trainer: Trainer, num_steps: int) -> Reads:
    reads, stepper = Reads(trainer.store.num_items), trainer.stepper
    while reads.batches < num_steps:
        for batch in trainer.loader:
            prepared = stepper.prepare(batch, reads.batches)
            sets = stepper.fetch(prepared)
            loss = stepper.compute(prepared, sets, reads.batches)
            rows = stepper.reduce(sets)
            reads.add(rows[0].slots, rows[0].grad, batch.items.values)
            stepper.update(rows, stepper.measure(loss, rows).grad_norm, 1.0)
            if reads.batches == num_steps:
                break
    return reads
