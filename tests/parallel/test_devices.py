"""Ranks whose devices are simulated: the CPU's weights in every mode, and collectives in one order from one thread."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.parallel.test_pipeline import MODES
from tests.simulated_device import ASKED, COLLECTIVES, DEVICE, SimulatedDevice, simulate
from tests.training.test_pipeline import sparse, train_epochs, with_pipeline
from turbogr import ops
from turbogr.config import Config, LossConfig
from turbogr.data.store import Store
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import World, connected_world
from turbogr.training.run import resolve_against
from turbogr.training.trainer import Trainer

CASES = {
    **MODES,
    "clipped": {"mode": "exact_overlap"},
    "offloaded": {"depth": 4},
}


def case_of(config: Config, name: str) -> Config:
    config = with_pipeline(config, **CASES[name])
    if name == "clipped":
        return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_norm=2.0))
    if name == "offloaded":
        return dataclasses.replace(config, loss=LossConfig(num_negatives=4, segment_mb=0.01, precision="fp16"))
    return config


def trained(config: Config, store: Path, run: Path, world: World, groups: int, device: torch.device) -> dict[str, Any]:
    """Train an epoch; return the weights, and what was sent and asked of the device."""
    opened = Store.open(store)
    mesh = Mesh.build(world, choose_mesh(world.size, world.size, groups=groups), "cpu")
    trainer = Trainer(resolve_against(config, opened), opened, run, device=device, peak_flops=None, mesh=mesh)
    ASKED.clear()
    COLLECTIVES.clear()
    steps = len(train_epochs(trainer, 1))
    found = {"steps": steps, "asked": Counter(ASKED), "sent": list(COLLECTIVES)}
    dense = [parameter.detach().cpu() for parameter in trainer.model.parameters()]
    tables = [table.cpu() for table in trainer.tables.gather_all().values()]
    return {**found, "weights": [tensor.numpy().copy() for tensor in (*dense, *tables)]}


def train_on_both(config: Config, store: Path, run: Path, groups: int, names: list[str]) -> dict[str, Any]:
    """Train every case on the CPU and on the simulated device."""
    results: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, ops.backend("reference"), connected_world() as world:
        for name in names:
            results[name] = trained(case_of(config, name), store, run, world, groups, torch.device("cpu"))
        simulate(patch)
        for name in names:
            with SimulatedDevice():
                results[f"{name} there"] = trained(case_of(config, name), store, run, world, groups, DEVICE)
    return results


@pytest.mark.parametrize(
    ("groups", "members", "names"),
    [
        (1, 2, ["sync", "semi_async", "exact_overlap", "clipped", "offloaded"]),
        (2, 1, ["exact_overlap"]),
        (2, 2, ["serial", "semi_async", "exact_overlap"]),
    ],
)
def test_devices_learn_what_cpus_do_and_one_thread_issues_in_one_order(
    groups: int, members: int, names: list[str], config: Config, store_path: Path, tmp_path: Path
) -> None:
    config = sparse(config)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=12))
    ranks = run_ranks(groups * members, train_on_both, config, store_path, tmp_path, groups, names)
    for name in names:
        for rank in ranks:
            cpu, there = rank[name], rank[f"{name} there"]
            assert not cpu["sent"] and len(there["sent"]) > 2 * there["steps"]
            for wanted, found in zip(cpu["weights"], there["weights"], strict=True):
                assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
            assert {thread for thread, _ in there["sent"]} == {"turbogr-collectives"}
            assert there["sent"] == ranks[0][f"{name} there"]["sent"], "the same order on all ranks"
            repeated = {what: times for what, times in there["asked"].items() if times > 1}
            if name != "offloaded":  # its segments are found on the host, in the rows that are there
                assert repeated == {"copy to the host: agree (training/step.py)": there["steps"]}
