from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import run_ranks
from turbogr import bench
from turbogr.bench import _comm_rank, comm
from turbogr.bench._network import Network, Node
from turbogr.bench._steps import equal_batch
from turbogr.errors import UserError
from turbogr.parallel.world import connected_world

OPTIONS: dict[str, Any] = {
    "model": "hstu",
    "preset": "tiny",
    "lengths": [20, 9],
    "num_items": 300,
    "num_negatives": 4,
    "steps": 2,
    "meshes": {"flat": (1, "fp32"), "hierarchical": (2, "fp32"), "fp16": (2, "fp16"), "bf16": (2, "bf16")},
}


def measure_small() -> dict[str, Any]:
    with connected_world() as world:
        return _comm_rank.measure(world, OPTIONS)


def test_ranks_agree_on_the_times() -> None:
    first, *others = run_ranks(4, measure_small, local_size=2)
    assert all(other == first for other in others)
    assert first.keys() == OPTIONS["meshes"].keys()
    for found in first.values():
        assert 0 < found["all_to_all"] < found["communication"]
        assert found["step"] > 0
    assert first["flat"]["row_error"] == first["hierarchical"]["row_error"] == 0
    assert 0 < first["fp16"]["row_error"] < 2**-10 < first["bf16"]["row_error"] < 2**-7


def measure_buckets() -> dict[str, Any]:
    options = {key: value for key, value in OPTIONS.items() if key != "meshes"}
    with connected_world() as world:
        return _comm_rank.measure(world, {**options, "buckets": {"after": 2**62, "during": 1000}})


def test_steps_are_timed_for_every_size_of_buckets() -> None:
    first, second = run_ranks(2, measure_buckets)
    assert first == second and first.keys() == {"after", "during"} and min(first.values()) > 0


def run_separated() -> tuple[list[float], list[bool], float]:
    """Return a sum and an exchange that ran separately, which calls use the default group, and the shortest time."""
    with connected_world() as world:
        mine = torch.full((2,), world.rank + 1.0)
        received = torch.empty(2)
        with _comm_rank.separate_collectives() as calls:
            dist.all_to_all_single(received, mine)
            work = dist.all_reduce(mine, group=dist.group.WORLD, async_op=True)
            work.wait()
        assert dist.all_reduce(torch.zeros(1)) is None and len(calls) == 2
        return [*mine.tolist(), *received.tolist()], [group is None for group, _ in calls], min(t for _, t in calls)


def test_separated_collectives_give_the_same_results() -> None:
    for values, defaults, seconds in run_ranks(2, run_separated):
        assert values == [3.0, 3.0, 1.0, 2.0]
        assert defaults == [True, False] and seconds > 0


def count_exchanges() -> tuple[int, int]:
    """Return the number of messages of a step of two ranks that share a table: inside the group, and over all ranks."""
    with connected_world() as world:
        stepper, batch = _comm_rank._stepper(world, OPTIONS, 1, "fp32"), equal_batch(OPTIONS, world)
        with _comm_rank.separate_collectives() as calls:
            _comm_rank._train(stepper, batch, 0)
        inside = sum(group is stepper.mesh.member_ranks for group, _ in calls)
        return inside, len(calls) - inside


def test_every_message_of_the_item_table_is_timed() -> None:
    for inside, others in run_ranks(2, count_exchanges):
        assert inside == 4, "numbers of ids, ids, vectors and gradients"
        assert others > 0


@contextmanager
def no_network(num_nodes: int, megabits: float) -> Iterator[Network]:
    yield Network((Node(),) * num_nodes, f"{num_nodes} nodes at {megabits:g}")


def fake_ranks(module: str, ranks: int, options: dict[str, Any], network: Network) -> dict[str, Any]:
    if "buckets" in options:
        assert ranks == len(network.nodes) == 2 and options["preset"] == "medium"
        return {"after the backward": 4.0, "during the backward": 3.0}
    assert options["meshes"]["hierarchical"][0] == len(network.nodes)
    flat = {"all_to_all": 0.4, "communication": 0.5, "step": float(ranks), "row_error": 0.0}
    other = {"all_to_all": 0.1, "communication": 0.4, "step": 0.75 * ranks, "row_error": 0.001}
    return {"flat": flat, "hierarchical": other, "fp16": other, "bf16": flat}


def test_the_record_has_the_documented_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "run_as_ranks", fake_ranks)
    monkeypatch.setattr(comm, "emulated_network", no_network)
    record, result = bench.run_benchmark("comm", ["megabits=80"])
    for case in ("2x2", "4x2"):
        assert record.figures[f"all_to_all_saving_{case}"] == pytest.approx(0.75)
        assert record.figures[f"communication_saving_{case}"] == pytest.approx(0.2)
        assert record.figures[f"step_saving_{case}"] == pytest.approx(0.25)
        assert record.figures[f"step_saving_bf16_{case}"] == 0
        assert record.figures[f"row_error_fp16_{case}"] == 0.001
    assert record.figures["dense_overlap_saving"] == pytest.approx(0.25)
    assert result.notes == ["2 nodes at 80", "4 nodes at 80"]
    assert result.plots["comm"].startswith("<svg")


@pytest.mark.parametrize(
    ("setting", "message"), [("cases=1x4", "two or more nodes"), ("cases=2by2", "'2by2'"), ("preset=tini", "'tiny'")]
)
def test_bad_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.run_benchmark("comm", [setting])
