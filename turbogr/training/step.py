"""One training step in stages: fetch the rows, compute, sum gradients over the ranks, update.

Each stage is a method with explicit inputs and outputs, so that a pipeline can start the next batch's fetch early. With
one rank nothing is communicated and nothing copied. With many, every rank has its part of the step's sequences, and the
loss is the mean over all targets of the step: a rank's gradients are those of its own targets divided by the number of
all, and are summed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.config import Config
from turbogr.data.batching import Batch
from turbogr.data.loader import Loader
from turbogr.data.store import Store
from turbogr.negatives.loss_context import Counts
from turbogr.parallel.consistency import check_replicas
from turbogr.parallel.dense_gradients import FlatGradients
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.random import derive_seed
from turbogr.streams import keep_on_host, upload
from turbogr.tables.embedding_tables import EmbeddingTables, MakeTable
from turbogr.tables.table import LocalTable, RowGradients
from turbogr.tables.working_set import BatchIds, WorkingSets
from turbogr.tasks import make_task
from turbogr.tasks.task import DataFacts
from turbogr.training.dense_optimizer import DenseAdamW

_DROPOUT_SITE = 0xD0


class Measured(NamedTuple):
    """The step's mean loss, the norm of all gradients, and the signal that some rank wants to stop for (0: none).

    Of `rows_read` rows of the tables, `rows_shared` were in the batch before too. All this is the same on all ranks.
    Unless `summed`, the norm is that of all ranks' own gradients of rows laid side by side, not of their sums.
    """

    loss: float
    grad_norm: float
    signal: int
    rows_read: int
    rows_shared: int
    summed: bool
    loads: Tensor | None = None
    """`Stepper.own_load` of every rank, [ranks, 2]; None on one rank."""


class Stepper:
    """The task with its model, the tables, and their optimisers; the config must be resolved.

    `counts` returns how often items occur in the training events of `store`. `table_device` is where the tables live:
    on the device, or in host memory if the loss is computed in segments.
    """

    def __init__(
        self,
        config: Config,
        num_items: int,
        *,
        device: torch.device,
        mesh: Mesh,
        counts: Counts | None = None,
        store: Store | None = None,
    ) -> None:
        self.config, self.device, self.mesh = config, device, mesh
        # Rows that pass through an accelerator in segments live in host memory. Shards stay on their rank's device,
        # which exchanges them.
        offloads = config.loss.segment_mb is not None and mesh.world.size == 1
        self.table_device = torch.device("cpu") if offloads else device
        seed = config.train.seed
        self.task = make_task(config, DataFacts(num_items, counts, store))
        self.task.reset_parameters(torch.Generator().manual_seed(derive_seed(seed, 0)))
        self.model = self.task.model.to(device)
        self.tables = EmbeddingTables(self.task.tables, self._make_table(), config.optimizer)
        self.tables.draw(seed)
        self.task.reset_tables(self.tables)
        self.dense_optimizer = DenseAdamW(self.model, config.optimizer)
        self.gradients = FlatGradients(self.model, mesh.world)
        self.own_load = (0.0, 0.0)
        """Seconds that this rank worked in the step before, and what its part was planned to cost."""

    def _make_table(self) -> MakeTable:
        if self.mesh.world.size == 1:
            return partial(LocalTable, device=self.table_device)
        return partial(ShardedTable, mesh=self.mesh, device=self.device, precision=self.config.parallel.row_precision)

    def load(self, loader: Loader, position: Mapping[str, int], step: int) -> Batch:
        """Read the batch at a position of the loader, draw what its loss needs, and move it to the device.

        Runs on any thread, some steps ahead.
        """
        return self.prepare(loader.batch(**position), step)

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Draw what the loss of a batch needs, and move it to the device."""
        return self.to_device(self.task.prepare(batch, step))

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch on the device, which also keeps it in host memory, with what only the host asks of it."""
        if self.device.type == "cpu":
            return batch
        moved = upload(dataclasses.replace(batch, negatives=None, step_targets=None), self.device)
        keep_on_host(moved.items.offsets, batch.items.offsets)
        return dataclasses.replace(
            moved,
            negatives=batch.negatives,
            step_lengths=batch.lengths_of_step,
            step_num_trained=batch.num_trained_of_step,
            on_host=batch,
        )

    def ids(self, batch: Batch) -> BatchIds:
        """Return every id that the loss of a prepared batch needs, in host memory."""
        return self.task.ids(batch.at_hand)

    def fetch(self, batch: Batch) -> WorkingSets:
        """Fetch every row that the loss of a prepared batch needs."""
        return self.tables.fetch(self.ids(batch))

    def loss(self, batch: Batch, sets: WorkingSets, step: int) -> Tensor:
        """Return this rank's part of the step's loss: the sum over its tokens divided by the number of all."""
        return self.task.loss(sets, batch, step, seed=derive_seed(self.config.train.seed, _DROPOUT_SITE, step))

    def compute(self, batch: Batch, sets: WorkingSets, step: int) -> Tensor:
        """Run forward and backward and return this rank's part of the loss; without tokens it is zero."""
        self.gradients.attach()
        if not batch.num_tokens:
            return torch.zeros((), device=self.device)
        loss = self.loss(batch, sets, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def reduce(self, sets: WorkingSets) -> list[RowGradients]:
        """Sum all gradients over the ranks: those of the dense parameters in place, those of the rows as returned."""
        self.gradients.start()
        rows = self.tables.sum_gradients([group.request for group in sets.groups], sets.gradients())
        self.gradients.finish()
        return rows

    def measure(self, loss: Tensor, rows: Sequence[RowGradients], signal: int = 0) -> Measured:
        """Agree on what the step's loss and gradients are; `signal` is what this rank would stop for."""
        return self.agree(loss, [part.grad for part in rows], signal, summed=True)

    def agree(
        self,
        loss: Tensor,
        row_grads: Sequence[Tensor],
        signal: int,
        *,
        summed: bool,
        rows_read: int = 0,
        rows_shared: int = 0,
    ) -> Measured:
        """The same, also before the rows' gradients are summed over the ranks (`summed` false).

        The norm is then that of all ranks' own gradients laid side by side. If it is finite so are the sums: a norm is
        finite only below the square root of the largest number.
        """
        dense = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        row_norms = [torch.linalg.vector_norm(grad).to(loss.device) for grad in row_grads]
        row_norm = row_norms[0] if len(row_norms) == 1 else torch.linalg.vector_norm(torch.stack(row_norms))
        mine = torch.stack([loss, torch.nn.utils.get_total_norm(dense), row_norm]).cpu().double()
        also = mine.new_tensor([signal, rows_read, rows_shared, *self.own_load])
        everyone = self.mesh.world.gather(torch.cat([mine, also]))
        total_row_norm = torch.linalg.vector_norm(everyone[: self.mesh.members if summed else None, 2])
        norm = math.hypot(float(everyone[0, 1]), float(total_row_norm))  # one number for all ranks, to the last bit
        totals = everyone.sum(0).tolist()
        return Measured(
            totals[0],
            norm,
            int(everyone[:, 3].max()),
            int(totals[4]),
            int(totals[5]),
            summed or self.mesh.world.size == 1,
            everyone[:, 6:] if self.mesh.world.size > 1 else None,
        )

    def update(self, rows: Sequence[RowGradients], grad_norm: float, factor: float) -> None:
        """Clip by the norm, then update everything with `factor` times the learning rates."""
        self.clip(rows, grad_norm)
        self.update_dense(factor)
        self.update_rows(rows, factor, self.tables.begin_update())

    def clip(self, rows: Sequence[RowGradients], grad_norm: float) -> None:
        """Scale all gradients down if their norm is too large."""
        clip_norm = self.config.optimizer.clip_norm
        if clip_norm is None:
            return
        norm = torch.full((), grad_norm, dtype=torch.float32, device=self.device)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip_norm, norm)
        scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for part in rows:
            part.grad.mul_(scale.to(part.grad.device))

    def drop_gradients(self) -> None:
        """Forget the gradients of the dense parameters, without an update."""
        self.model.zero_grad(set_to_none=True)

    def update_dense(self, factor: float) -> None:
        """Update the dense parameters with `factor` times their learning rate."""
        self.dense_optimizer.step(self.config.optimizer.lr * factor)

    def update_rows(self, rows: Sequence[RowGradients], factor: float, numbers: Sequence[int]) -> None:
        """Update rows of every group in the step that has these numbers with the groups' optimisers."""
        self.tables.update(rows, factor, numbers)

    def check_replicas(self, slots: Sequence[Tensor], step: int) -> None:
        """Compare the copies of the dense parameters, the rows just updated and their optimisers' state over the ranks.

        Raises:
            ReplicaError: they differ.
        """
        if self.mesh.world.size == 1:
            return
        dense_state = [tensor for state in self.dense_optimizer.state().values() for tensor in state.values()]
        sharded: dict[str, list[Tensor]] = {}
        for group, updated in zip(self.tables.groups, slots, strict=True):
            state = group.optimizer.state().values()
            sharded[f"rows of the table {group.title}"] = [group.table.weight[updated]]
            sharded[f"moments of the table {group.title}"] = [
                tensor[updated] if tensor.dim() else tensor for tensor in state
            ]
        check_replicas(
            self.mesh,
            {"dense parameters": self.model.parameters(), "moments of the dense parameters": dense_state},
            sharded,
            step,
        )

    def state(self, past_weights: Sequence[Sequence[Tensor]] = ()) -> dict[str, Any]:
        """Return every tensor of a training run, as checkpoints name them.

        `past_weights` are past versions of the tables that batches in flight still depend on, oldest first. On one rank
        these are the tensors themselves; on many, those of the tables are exchanged copies that `adopt` takes back.
        """
        state = {
            "model": dict(self.model.named_parameters()),
            "tables": self.tables.state(),
            "dense_optimizer": self.dense_optimizer.state(),
            **({"task": kept} if (kept := self.task.state()) else {}),
        }
        past = {name: self.tables.export_weights(weights) for name, weights in _by_age(past_weights).items()}
        return state | ({"past_tables": past} if past else {})

    def is_finite(self) -> bool:
        """Whether all weights and optimiser state that this process holds are finite."""
        tensors = [*self.model.parameters(), *self.tables.weights]
        tensors += [tensor for state in self.dense_optimizer.state().values() for tensor in state.values()]
        tensors += [tensor for group in self.tables.groups for tensor in group.optimizer.state().values()]
        return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)

    def adopt(self, state: dict[str, Any], past_weights: Sequence[Sequence[Tensor]] = ()) -> None:
        """Take over the rows of a `state` that was loaded into, made with the same `past_weights`."""
        self.tables.adopt(state["tables"])
        for name, weights in _by_age(past_weights).items():
            self.tables.import_weights(state["past_tables"][name], weights)


def _by_age(versions: Sequence[Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
    """Return past versions by how many updates they miss."""
    return {f"missing_{len(versions) - number}": weights for number, weights in enumerate(versions)}
