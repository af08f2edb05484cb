"""What is left of a world when its ranks have disconnected: no thread, and no model that nobody uses."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.ranks import run_ranks
from turbogr.parallel.dense_gradients import FlatGradients
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.world import connected_world


def native_threads() -> list[str]:
    tasks = Path("/proc/self/task")
    return sorted((task / "comm").read_text().strip() for task in tasks.iterdir())


KEPT: list[Any] = []


def connect_and_leave() -> tuple[list[str], list[str]]:
    """Use every kind of process group and keep who uses it; return the threads before the end and after it."""
    with connected_world() as world:
        mesh = Mesh.build(world, choose_mesh(world.size, world.size), "cpu")
        model = torch.nn.Linear(2, 2)
        gradients = FlatGradients(model, world)
        gradients.attach()
        model(torch.ones(1, 2)).sum().backward()
        gradients.start()
        gradients.finish()
        KEPT.extend([mesh, mesh.channel(), gradients])
        before = native_threads()
    deadline = time.monotonic() + 10
    while len(native_threads()) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, native_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="the system must list the threads of a process")
def test_no_thread_is_left_when_the_ranks_have_disconnected() -> None:
    for before, after in run_ranks(2, connect_and_leave):
        assert "pt_gloo_runloop" in before
        assert len(after) == 1, after


def test_gradients_can_be_freed() -> None:
    """A hook of a parameter must not own them: Python would never see the cycle, and never free the model."""

    assert all(run_ranks(2, make_and_drop_gradients))


def make_and_drop_gradients() -> bool:
    with connected_world() as world:
        gradients = weakref.ref(FlatGradients(torch.nn.Linear(2, 2), world))
        gc.collect()
        return gradients() is None
