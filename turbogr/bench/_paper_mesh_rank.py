"""One rank of table 4: predicts the traffic of both meshes, then times their collectives in turn."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from turbogr import ops
from turbogr.bench._comm_rank import _separated, _stepper, _train
from turbogr.bench._ranks import rank_main
from turbogr.bench._steps import equal_batch
from turbogr.parallel.mesh_traffic import (
    MeasuredLink,
    MeasuredLinks,
    RowTraffic,
    choose_groups,
    predicted_seconds,
)
from turbogr.parallel.row_exchange import start_exchange
from turbogr.parallel.world import World, communicating

_LINK_BYTES = 1 << 22
_REPEATS = 5


def measure(world: World, options: dict[str, Any]) -> dict[str, Any]:
    """Return the chosen number of groups and why, both predictions, and the seconds of every alternation."""
    ops.keep_freed_memory()
    nodes = options["nodes"]
    batch = equal_batch(options, world)
    steppers = {"flat": _stepper(world, options, 1, "fp32"), "hierarchical": _stepper(world, options, nodes, "fp32")}
    hierarchical = steppers["hierarchical"]
    links = MeasuredLinks(
        _link(world, dist.group.WORLD, world.size),
        _link(world, hierarchical.mesh.member_ranks, hierarchical.mesh.members),
        _link(world, hierarchical.mesh.replica_ranks, nodes),
    )
    prepared = hierarchical.prepare(batch, 0)
    request = hierarchical.fetch(prepared).groups[0].request
    hierarchical.drop_gradients()
    traffic = RowTraffic.of_steps([world.gather_objects(request.ids.numpy())], world.size // nodes)
    row_bytes = 4 * hierarchical.tables.groups[0].dim
    shape = (nodes, world.size // nodes)
    groups, reason = choose_groups(traffic, links, row_bytes, *shape)
    for stepper in steppers.values():
        _train(stepper, batch, 0)
    found: dict[str, Any] = {"flat": [], "hierarchical": []}
    for number in range(1, options["steps"] + 1):
        for name, stepper in steppers.items():
            found[name].append(_separated(stepper, batch, number)[1])
    predicted = predicted_seconds(traffic, links, row_bytes, *shape)
    return {**found, "groups": groups, "reason": reason, "predicted": predicted}


def _link(world: World, group: Any, size: int) -> MeasuredLink:
    """Time exchanges of nothing and of some megabytes between the ranks of a group, all groups at once."""

    def seconds(num_bytes: int) -> float:
        data = torch.zeros(max(1, num_bytes // 4 // size) * size)
        out, parts = torch.empty_like(data), [data.numel() // size] * size
        own = []
        with communicating():
            for _ in range(_REPEATS):
                dist.barrier()
                started = time.perf_counter()
                start_exchange(out, data, parts, parts, group).wait()
                own.append(time.perf_counter() - started)
        return float(median(max(times) for times in zip(*world.gather_objects(own), strict=True)))

    if size == 1:
        return MeasuredLink(0.0, float("inf"))
    latency = seconds(0)
    return MeasuredLink(latency, _LINK_BYTES * (size - 1) / size / max(seconds(_LINK_BYTES) - latency, 1e-9))


if __name__ == "__main__":
    rank_main(measure)
