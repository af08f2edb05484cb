"""How many rows consecutive batches of a data set share, and how much of the gradient falls on popular rows.

Trains some steps on a prepared store and counts for every row of the item table how many batches read it. `alpha` is
the share of batches that read the most popular row, `collision_rate` the share of a batch's rows that the batch before
read too, `input_collision_rate` the share that is moreover among its inputs, which `exact_overlap` waits for, and
`alpha_eff` the mean share of batches over the rows, each weighted by its squared gradients: what the bounds of
`semi_async` depend on.
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
from turbogr.layers.item_table import marked
from turbogr.train.run import resolve_against
from turbogr.train.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "data": "",  # folder of a prepared store
    "recipe": "",  # a recipe; without one, the defaults
    "steps": 200,
}


class Reads:
    """Counts, over batches, which rows are read and how large their gradients are."""

    def __init__(self, num_rows: int) -> None:
        self.batches, self.rows_read, self.rows_shared, self.inputs_shared = 0, 0, 0, 0
        self._counts = torch.zeros(num_rows, dtype=torch.float64)
        self._squares = torch.zeros(num_rows, dtype=torch.float64)
        self._before: Tensor | None = None

    def add(self, ids: Tensor, grad: Tensor, inputs: Tensor) -> None:
        """Count a batch with distinct rows `ids` [R] and their gradients [R, d]; `inputs` are rows in any number."""
        self.batches += 1
        self._counts[ids] += 1.0
        self._squares[ids] += grad.double().square().sum(1)
        now = marked(self._counts[:, None], [ids])
        if self._before is not None:
            self.rows_read += ids.numel()
            self.rows_shared += int((now & self._before).sum())
            self.inputs_shared += int((marked(self._counts[:, None], [inputs]) & self._before).sum())
        self._before = now

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
    """Train and count; figures `alpha`, `alpha_eff`, `collision_rate`, `input_collision_rate` and `rows_per_batch`."""
    if not settings["data"]:
        raise UserError("bench collisions needs a prepared store; give it with --set data=DIR")
    config = load_config(settings["recipe"]) if settings["recipe"] else Config()
    store = Store.open(settings["data"])
    ops.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        config = resolve_against(config, store)
        trainer = Trainer(config, store, Path(folder), device=torch.device("cpu"), gemm_peak=None)
        reads = _count(trainer, settings["steps"])
    note = f"{reads.batches} batches of {config.data.batch_size or config.data.batch_tokens} from {store.path}"
    return Result(reads.figures(), [], {}, [note])


def _count(trainer: Trainer, num_steps: int) -> Reads:
    reads, stepper = Reads(trainer.table.num_items), trainer.stepper
    while reads.batches < num_steps:
        for batch in trainer.loader:
            working_set = stepper.fetch(batch, reads.batches)
            loss = stepper.compute(batch, working_set, reads.batches)
            rows = stepper.reduce(working_set)
            reads.add(rows.slots, rows.grad, batch.items.values)
            stepper.update(rows, stepper.measure(loss, rows).grad_norm, 1.0)
            if reads.batches == num_steps:
                break
    return reads
