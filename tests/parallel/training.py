"""Training functions that ranks run in the tests: some steps, and the resulting weights."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from turbogr import machine
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.parallel.world import World, connected_world
from turbogr.training.run import resolve_against, train
from turbogr.training.trainer import Trainer


def make_trainer(config: Config, store: Path, run: Path, world: World, groups: int = 1) -> Trainer:
    opened = Store.open(store)
    mesh = Mesh.build(world, choose_mesh(world.size, world.size, groups=groups), "cpu")
    return Trainer(resolve_against(config, opened), opened, run, device=torch.device("cpu"), peak_flops=None, mesh=mesh)


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return every tensor of a run by name, unsharded; all ranks call it together."""
    flat: dict[str, Tensor] = {}

    def collect(prefix: str, tree: dict[str, Any]) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                collect(f"{prefix}{key}.", value)
            else:
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                flat[f"{prefix}{key}"] = whole.detach().clone()

    collect("", trainer.state())
    return flat


def train_both_optimizers(config: Config, store: Path, run: Path, groups: int, steps: int) -> dict[str, Any]:
    """`train_steps` with each of the table's optimisers."""
    results = {}
    with connected_world():
        for name in ("adam", "adagrad"):
            optimizer = dataclasses.replace(config.optimizer, table=name)
            results[name] = train_steps(dataclasses.replace(config, optimizer=optimizer), store, run, groups, steps)
    return results


def train_steps(config: Config, store: Path, run: Path, groups: int, steps: int) -> dict[str, Any]:
    """Train some steps from the start; return the state, the losses, this rank.s shard and its batches."""
    with connected_world() as world:
        trainer = make_trainer(config, store, run, world, groups)
        losses, items = [], []
        while len(losses) < steps:
            for batch in trainer.loader:
                items.append(batch.items.values.tolist())
                before = trainer.progress.window.loss_sum
                trainer.step(batch)
                losses.append((trainer.progress.window.loss_sum - before, trainer.progress.window.grad_norm))
                if len(losses) == steps:
                    break
        table = trainer.tables.groups[0].table
        shard = table.weight.clone() if isinstance(table, ShardedTable) else None
        state = whole_state(trainer)
        # Tensors would be shared through files that disappear with this process.
        return {
            "state": {name: tensor.numpy() for name, tensor in state.items()} if world.is_first else None,
            "losses": losses,
            "shard": None if shard is None else shard.numpy(),
            "dense": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy(),
            "tokens": trainer.progress.tokens,
            "items": items,
        }


def save_after(config: Config, store: Path, run: Path, groups: int, steps: int) -> dict[str, Any] | None:
    """Train some steps and save a checkpoint; return the state on rank 0."""
    with connected_world() as world:
        trainer = make_trainer(config, store, run, world, groups)
        for _, batch in zip(range(steps), trainer.loader, strict=False):
            trainer.step(batch)
        trainer.checkpoints.save(trainer.state(), trainer.progress)
        state = whole_state(trainer)
        return {name: tensor.numpy() for name, tensor in state.items()} if world.is_first else None


def save_with_past_tables(config: Config, store: Path, run: Path, groups: int, steps: int) -> None:
    """Train some steps and save, with a half and three quarters of the tables as their past versions."""
    with connected_world() as world:
        trainer = make_trainer(config, store, run, world, groups)
        for _, batch in zip(range(steps), trainer.loader, strict=False):
            trainer.step(batch)
        past = [[factor * weight for weight in trainer.tables.weights] for factor in (0.5, 0.75)]
        trainer.progress.earlier_tables = len(past)
        trainer.checkpoints.save(trainer.stepper.state(past), trainer.progress, background=True)
        trainer.checkpoints.finish()


def load_state(config: Config, store: Path, run: Path, groups: int) -> dict[str, Any]:
    """Resume; return the state as loaded."""
    with connected_world() as world:
        trainer = make_trainer(config, store, run, world, groups)
        trainer.resume()
        return {name: tensor.numpy() for name, tensor in whole_state(trainer).items()}


def load_and_finish_epoch(config: Config, store: Path, run: Path, groups: int) -> dict[str, Any]:
    """Resume, then train to the end of the epoch; return the state as loaded, the events seen and the last loss."""
    with connected_world() as world:
        trainer = make_trainer(config, store, run, world, groups)
        trainer.resume()
        state = whole_state(trainer)
        seen = []
        for batch in trainer.loader:
            trainer.step(batch)
            seen.append(batch.events.numpy())
        return {
            "state": {name: tensor.numpy() for name, tensor in state.items()},
            "seen": np.concatenate(seen),
            "loss": trainer.progress.window.loss_sum,
            "dense": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy(),
        }


def train_run(config: Config, store: Path, out: Path, signalled: int | None = None, **options: Any) -> dict[str, Any]:
    """`turbogr.train`, with SIGTERM raised on rank `signalled` after its third step; return how it ended."""
    step = Trainer.step

    def raising(self: Trainer, batch: Any) -> None:
        step(self, batch)
        if self.world.rank == signalled and self.progress.step == 3:
            signal.raise_signal(signal.SIGTERM)

    try:
        with mock.patch.object(Trainer, "step", raising), mock.patch.object(machine, "gemm_peak", return_value=1e11):
            result = train(config, store, out, **options)
        return {"status": result.status, "step": result.step, "signal": result.signal, "best": result.best_value}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
