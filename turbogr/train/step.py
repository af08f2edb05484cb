"""One training step in stages: fetch the rows, compute, reduce over the ranks, update.

Each stage is a method of its own whose inputs and outputs are explicit, so that a pipeline can start the next batch's
fetch early. With one rank nothing is communicated and nothing copied; with many, every rank has its part of the step's
sequences, and the loss is the mean over all tokens of the step wherever they are: the gradients of a rank are those of
its own tokens divided by the number of all, and are summed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.config import Config
from turbogr.data.batching import Batch
from turbogr.layers.item_table import ItemTable, RowGradients, Table, WorkingSet
from turbogr.models import RetrievalModel
from turbogr.negatives import Objective
from turbogr.negatives.samplers import Counts
from turbogr.parallel.agreement import check_replicas
from turbogr.parallel.dense import FlatGradients
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.random import derive_seed
from turbogr.train.optimizers import DenseAdamW, make_row_optimizer

_DROPOUT_SITE = 0xD0
_TABLE_SITE = 0x7AB1E


class Measured(NamedTuple):
    """The step's mean loss, the norm of all gradients, and the signal that some rank wants to stop for, 0 for none; of
    `rows_read` rows of the table, `rows_shared` were in the batch before too. All this is the same on all ranks;
    `finite` tells of this rank's part of the loss. Unless `summed`, the norm is that of the ranks' own gradients of
    rows beside each other, not of their sums."""

    loss: float
    grad_norm: float
    signal: int
    rows_read: int
    rows_shared: int
    finite: bool
    summed: bool


class Stepper:
    """The model, its item table, and what changes them; the config must be resolved.

    `counts` tells how often items occur in the training events, for samplers that go by it. `home` is where the table
    lives: on the device, or in host memory if the loss is computed in segments.
    """

    def __init__(
        self, config: Config, num_items: int, *, device: torch.device, mesh: Mesh, counts: Counts | None = None
    ) -> None:
        assert config.model.dim is not None, "resolve the config first"
        self.config, self.device, self.mesh = config, device, mesh
        # Rows that pass through an accelerator in segments live beside it. Shards stay with their rank's device, which
        # is what exchanges them.
        offloads = config.loss.segment_mb is not None and mesh.world.size == 1
        self.home = torch.device("cpu") if offloads else device
        seed = config.train.seed
        self.model = RetrievalModel(config.model, recompute=config.train.recompute)
        self.model.reset_parameters(torch.Generator().manual_seed(derive_seed(seed, 0)))
        self.model.to(device)
        self.table: Table
        if mesh.world.size == 1:
            self.table = ItemTable(num_items, config.model.dim, device=self.home)
        else:
            self.table = ShardedTable(num_items, config.model.dim, mesh, device=device, precision=config.parallel.wire)
        self.table.reset_parameters(derive_seed(seed, _TABLE_SITE))
        self.objective = Objective(config.loss, num_items, seed, counts)
        self.dense = DenseAdamW(self.model, config.optimizer)
        self.rows = make_row_optimizer(self.table.weight, config.optimizer)
        self.gradients = FlatGradients(self.model, mesh.world)

    def ids(self, batch: Batch, step: int) -> list[Tensor]:
        """Draw the negatives of a batch, unless that has been done, and return every item that its loss needs."""
        batch = batch.to(self.home)
        drawn = self.objective.draw(batch, step) if batch.negatives is None else batch.negatives
        return self.model.ids(batch, drawn)

    def draw_ahead(self, batch: Batch, step: int) -> Batch:
        """Return the batch with its negatives, which may be drawn some steps early and on any thread."""
        return dataclasses.replace(batch, negatives=self.objective.draw(batch, step))

    def place(self, batch: Batch) -> Batch:
        """Return the batch on the device, but its negatives where the table is."""
        negatives = None if batch.negatives is None else batch.negatives.to(self.home)
        return dataclasses.replace(dataclasses.replace(batch, negatives=None).to(self.device), negatives=negatives)

    def fetch(self, batch: Batch, step: int) -> WorkingSet:
        """Draw the negatives of a batch and fetch every row that its loss needs."""
        return self.table.fetch(self.ids(batch, step))

    def loss(self, batch: Batch, working_set: WorkingSet, step: int) -> Tensor:
        """Return this rank's part of the step's loss: the sum over its tokens divided by the number of all."""
        seed = derive_seed(self.config.train.seed, _DROPOUT_SITE, step)
        losses = self.model.loss(working_set, batch, objective=self.objective, step=step, seed=seed)
        return losses.sum() / int(batch.lengths_of_step.sum())

    def compute(self, batch: Batch, working_set: WorkingSet, step: int) -> Tensor:
        """Run forward and backward and return this rank's part of the loss; without tokens it is zero."""
        self.gradients.attach()
        if not batch.num_tokens:
            return torch.zeros((), device=self.device)
        loss = self.loss(batch, working_set, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def reduce(self, working_set: WorkingSet) -> RowGradients:
        """Sum all gradients over the ranks: those of the dense parameters in place, those of the rows as returned."""
        self.gradients.start()
        rows = self.table.row_gradients(working_set)
        self.gradients.finish()
        return rows

    def measure(self, loss: Tensor, rows: RowGradients, signal: int = 0) -> Measured:
        """Agree on what the step's loss and gradients are; `signal` is this rank's wish to stop."""
        return self.agree(loss, rows.grad, signal, summed=True)

    def agree(
        self, loss: Tensor, row_grad: Tensor, signal: int, *, summed: bool, rows_read: int = 0, rows_shared: int = 0
    ) -> Measured:
        """The same before the rows' gradients are summed over the ranks, unless they are `summed`.

        The norm is then that of the ranks' own gradients beside each other. If it is finite so are the sums: norms are
        finite below the square root of the largest number only.
        """
        dense = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norms = [torch.nn.utils.get_total_norm(dense), torch.linalg.vector_norm(row_grad).to(loss.device)]
        mine = torch.stack([loss, *norms]).double().cpu()
        everyone = self.mesh.world.gather(torch.cat([mine, mine.new_tensor([signal, rows_read, rows_shared])]))
        row_norm = torch.linalg.vector_norm(everyone[: self.mesh.members if summed else None, 2])
        norm = math.hypot(float(everyone[0, 1]), float(row_norm))  # one number for all ranks, to the last bit
        totals = everyone.sum(0).tolist()
        return Measured(
            totals[0],
            norm,
            int(everyone[:, 3].max()),
            int(totals[4]),
            int(totals[5]),
            math.isfinite(float(mine[0])),
            summed or self.mesh.world.size == 1,
        )

    def update(self, rows: RowGradients, grad_norm: float, factor: float) -> None:
        """Clip by the norm, then update everything with `factor` times the learning rates."""
        self.clip(rows, grad_norm)
        self.update_dense(factor)
        self.update_rows(rows, factor, self.rows.begin())

    def clip(self, rows: RowGradients, grad_norm: float) -> None:
        """Scale all gradients down if their norm is too large."""
        clip_norm = self.config.optimizer.clip_norm
        if clip_norm is not None:
            norm = torch.full((), grad_norm, dtype=torch.float32, device=self.device)
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip_norm, norm)
            rows.grad.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0).to(rows.grad.device))

    def update_dense(self, factor: float) -> None:
        """Update the dense parameters with `factor` times their learning rate."""
        self.dense.step(self.config.optimizer.lr * factor)

    def update_rows(self, rows: RowGradients, factor: float, number: int) -> None:
        """Update rows of the table in the step that has this number with `self.rows`."""
        optimizer = self.config.optimizer
        self.rows.update(rows.slots, rows.grad, (optimizer.table_lr or optimizer.lr) * factor, number)

    def check_replicas(self, slots: Tensor, step: int) -> None:
        """Compare the copies of the dense parameters, of the rows just updated and of their optimisers' state over the
        ranks.

        Raises:
            ReplicaError: they differ.
        """
        if self.mesh.world.size > 1:
            dense_state = [tensor for state in self.dense.state().values() for tensor in state.values()]
            row_state = [tensor[slots] if tensor.dim() else tensor for tensor in self.rows.state().values()]
            check_replicas(
                self.mesh,
                {"dense parameters": self.model.parameters(), "moments of the dense parameters": dense_state},
                {"item vectors": [self.table.weight[slots]], "moments of the item vectors": row_state},
                step,
            )

    def state(self, earlier: Sequence[Tensor] = ()) -> dict[str, Any]:
        """Every tensor of a training run, as checkpoints name them, rows in their natural order.

        `earlier` are the table's weights before the last updates, the latest last, where batches in flight read them.
        With one rank they are the tensors themselves; with many, the table's are exchanged copies that `adopt` takes
        back.
        """
        state = {
            "model": dict(self.model.named_parameters()),
            "table": self._exported({"weight": self.table.weight}),
            "dense_optimizer": self.dense.state(),
            "row_optimizer": self._exported(self.rows.state()),
            **({"negatives": negatives} if (negatives := self.objective.state()) else {}),
        }
        return state | ({"earlier": self._exported(_named(earlier))} if earlier else {})

    def adopt(self, state: dict[str, Any], earlier: Sequence[Tensor] = ()) -> None:
        """Take over the rows of a `state` that was loaded into, made with the same `earlier`."""
        if isinstance(self.table, ShardedTable):
            own = {"table": {"weight": self.table.weight}, "row_optimizer": self.rows.state()}
            own |= {"earlier": _named(earlier)}
            for part, tensors in own.items():
                for name, tensor in tensors.items():
                    if tensor.dim():
                        self.table.from_checkpoint(state[part][name], tensor)

    def _exported(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        table = self.table
        if not isinstance(table, ShardedTable):
            return tensors
        return {name: table.for_checkpoint(tensor) if tensor.dim() else tensor for name, tensor in tensors.items()}


def _named(earlier: Sequence[Tensor]) -> dict[str, Tensor]:
    """Earlier weights by how many updates they lack."""
    return {f"lacking_{len(earlier) - number}": weight for number, weight in enumerate(earlier)}
