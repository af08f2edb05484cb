"""Two ranks on two accelerators of this machine: rows exchanged and gradients summed, compared with what must come out.

The ranks are processes of their own with a rendezvous on this machine; one that hangs is ended after half a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from turbogr.accelerators import make_current
from turbogr.device_measurement import synchronize
from turbogr.parallel.dense_gradients import FlatGradients
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.sharded_table import ShardedTable
from turbogr.parallel.world import connected_world

_SECONDS = 30.0
_NUM_ROWS, _DIM = 1000, 64


def exchange_between_two(device: torch.device) -> dict[str, Any]:
    """Return how two ranks on two devices exchanged rows and summed gradients; a reason where there is one device."""
    count = torch.accelerator.device_count() if device.type not in ("cpu", "meta") else 0
    if count < 2:
        return {"what": "not tried: it takes two devices"}
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_run, args=(theirs, rank, port, device.type), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
    faults = [f"rank {rank}: {result['fault']}" for rank, result in enumerate(results) if "fault" in result]
    if faults:
        return {"fault": "; ".join(faults)}
    return {"what": "two ranks exchanged rows and summed gradients, all as they must be", "ranks": results}


def _receive(pipe: Connection) -> dict[str, Any]:
    try:
        found: dict[str, Any] = pipe.recv() if pipe.poll(_SECONDS) else {"fault": f"no answer within {_SECONDS:g} s"}
        return found
    except EOFError:
        return {"fault": "the process ended without a result"}


def _run(pipe: Connection, rank: int, port: int, kind: str) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        device = torch.device(kind, rank)
        make_current(device)
        pipe.send(check_exchange(device))
    except Exception as error:
        pipe.send({"fault": f"{type(error).__name__}: {error}"})


def check_exchange(device: torch.device) -> dict[str, Any]:
    """Fetch rows of a sharded table and sum gradients with the other ranks; return seconds, or what came out wrong."""
    found: dict[str, Any] = {}
    with connected_world() as world:
        for groups in (1, world.size):
            mesh = Mesh.build(world, choose_mesh(world.size, world.size, groups=groups), device.type)
            table = ShardedTable(_NUM_ROWS, _DIM, mesh, device=device)
            values = torch.arange(_NUM_ROWS, dtype=torch.float32)[:, None].expand(_NUM_ROWS, _DIM).contiguous()
            table.assign(0, values)
            ids = torch.arange(world.rank, _NUM_ROWS, 3)
            started = time.perf_counter()
            request = table.receive_ids(table.send_ids([ids]))
            rows = table.receive_rows(table.send_rows(request))
            summed = table.sum_gradients(table.send_gradients(request, torch.ones_like(rows)))
            synchronize(device)
            found[f"{groups}_groups_seconds"] = time.perf_counter() - started
            if not torch.equal(rows[request.index.long()].cpu(), values[ids]):
                return {"fault": f"rows fetched on a mesh of {mesh} are wrong"}
            owned = table.owned()[summed.slots.cpu()]
            users = torch.stack([(owned % 3 == rank).float() for rank in range(world.size)]).sum(0)
            if not torch.equal(summed.grad.cpu(), users[:, None].expand(-1, _DIM)):
                return {"fault": f"gradients summed on a mesh of {mesh} are wrong"}
        model = nn.Linear(_DIM, _DIM, device=device)
        gradients = FlatGradients(model, world)
        gradients.attach()
        model(torch.full((2, _DIM), 1.0 + world.rank, device=device)).sum().backward()
        gradients.start()
        gradients.finish()
        wanted = 2.0 * sum(1.0 + rank for rank in range(world.size))
        assert model.weight.grad is not None
        if not bool((model.weight.grad == wanted).all()):
            return {"fault": "dense gradients are summed wrongly"}
    return found
