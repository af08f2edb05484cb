"""A failure on one rank ends all ranks within seconds, with a message that names the rank; checkpoints stay intact."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import run_ranks
from tests.parallel.training import make_trainer, train_run
from tests.training.conftest import write_store
from turbogr import checkpoint_writer
from turbogr.checkpoint_writer import Copies
from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.errors import RankLost, UserError
from turbogr.parallel import consistency
from turbogr.parallel.consistency import ReplicaError
from turbogr.parallel.mesh import Mesh, choose_mesh
from turbogr.parallel.tensor_files import write_part
from turbogr.parallel.world import communicating, connected_world
from turbogr.training.step import Stepper


def train_differently(config: Config, store: Path, out: Path, what: str, other: Any) -> dict[str, Any]:
    """`train_run`, with other code, data or seed on rank 1."""
    if os.environ["RANK"] == "1":
        if what == "code":
            consistency.code_hash = lambda: "another code"
        elif what == "store":
            store = other
        else:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=other))
    return train_run(config, store, out)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("code", r"rank 1 differs from rank 0 in the code of turbogr: another code, not [0-9a-f]{12}"),
        ("seed", r"rank 1 differs from rank 0 in train\.seed: 7, not 0"),
        ("store", r"rank 1 differs from rank 0 in the data \(content hash\)"),
        ("missing", r"rank 1 of 2 failed: UserError: .*does not exist"),
    ],
)
def test_ranks_that_differ_are_refused(
    what: str, message: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    other: Any = 7
    if what == "store":
        other = write_store(tmp_path / "other", seed=5).path
    elif what == "missing":
        what, other = "store", tmp_path / "missing"
    ends = run_ranks(2, train_differently, config, store_path, tmp_path / "run", what, other)
    assert ends[0]["error"] == "UserError" and ends[1]["error"] == "ReportedByOtherRank"
    assert re.search(message, ends[0]["message"]), ends[0]["message"]
    assert not (tmp_path / "run").exists()


def train_on_another_disk(config: Config, store: Path, out: Path, other: Path, resume: bool) -> dict[str, Any]:
    """`train_run`, where rank 1 has another disk at the parent folder of `out`."""
    if os.environ["RANK"] == "1":
        libc = ctypes.CDLL(None, use_errno=True)
        private, bind, new_mounts = 1 << 18 | 1 << 14, 1 << 12, 0x00020000
        assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
        assert libc.mount(b"none", b"/", None, private, None) == 0, os.strerror(ctypes.get_errno())
        assert libc.mount(bytes(other), bytes(out.parent), None, bind, None) == 0, os.strerror(ctypes.get_errno())
        consistency._VISIBLE_WITHIN_SECONDS = 0.5
    return train_run(config, store, out, resume=resume)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting needs Linux and root")
@pytest.mark.parametrize("resume", [False, True])
def test_a_rank_with_another_disk_is_refused(resume: bool, config: Config, store_path: Path, tmp_path: Path) -> None:
    """The other ranks could not read its parts of checkpoints."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    message = r"rank 1 of 2 failed: UserError: .*run on .* is not the folder that rank 0 writes to"
    if resume:
        train_run(config, store_path, shared / "run")
        message = r"rank 1 differs from rank 0 in what --out holds: no run, not a run of 20"
    ends = run_ranks(2, train_on_another_disk, config, store_path, shared / "run", other, resume)
    assert ends[0]["error"] == "UserError" and ends[1]["error"] == "ReportedByOtherRank", ends
    assert re.search(message, ends[0]["message"]), ends[0]["message"]
    assert not list((shared / "run").glob(".seen*"))


def save_and_lose_a_part(config: Config, store: Path, run: Path) -> str:
    """Remove the file of rank 1 before rank 0 publishes a checkpoint; return what rank 0 raises."""

    def losing(parts: Any, folder: Path, *numbers: int) -> None:
        write_part(parts, folder, *numbers)
        if os.environ["RANK"] == "1":
            (folder / "part-1.safetensors").unlink()

    with connected_world() as world:
        trainer = make_trainer(config, store, run, world)
        try:
            with mock.patch.multiple(checkpoint_writer, write_part=losing, _VISIBLE_SECONDS=0.2):
                trainer.checkpoints.save(trainer.state(), trainer.progress)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_checkpoint_without_all_parts_is_not_published(config: Config, store_path: Path, tmp_path: Path) -> None:
    message, _ = run_ranks(2, save_and_lose_a_part, config, store_path, tmp_path / "run")
    assert re.search(r"FileNotFoundError: .*a rank wrote its part of the checkpoint elsewhere: .*part-1", message), (
        message
    )
    assert Checkpoints(tmp_path / "run").newest() is None


def train_poisoned(config: Config, store: Path, out: Path) -> dict[str, Any]:
    loss = Stepper.loss

    def poisoned(self: Stepper, batch: Any, working_set: Any, step: int) -> Any:
        value = loss(self, batch, working_set, step)
        return value * float("nan") if step == 5 and self.mesh.world.rank == 1 else value

    Stepper.loss = poisoned  # type: ignore[method-assign]
    return train_run(config, store, out)


def test_a_value_that_is_not_finite_on_one_rank_stops_all(config: Config, store_path: Path, tmp_path: Path) -> None:
    ends = run_ranks(2, train_poisoned, config, store_path, tmp_path / "run")
    assert ends[0]["error"] == "NonFiniteError" and ends[1]["error"] == "ReportedByOtherRank"
    assert "not finite at step 6; users of the batch: 1" in ends[0]["message"]
    assert Checkpoints(tmp_path / "run").newest() == 5
    assert train_run(config, store_path, tmp_path / "run", resume=True)["status"] == "finished"


def change_a_copy(config: Config, store: Path, out: Path, what: str) -> str:
    """Change one bit in rank 1's copy and continue training; return what is raised."""
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, check_every=2))
    with connected_world() as world:
        trainer = make_trainer(config, store, out, world, groups=2)
        try:
            for batch in trainer.loader:
                if world.rank == 1 and trainer.progress.step == 2:
                    tensor = trainer.model.position if what == "dense" else trainer.tables.weights[0]
                    with torch.no_grad():
                        tensor.view(torch.int32)[:, 0] ^= 1
                trainer.step(batch)
        except ReplicaError as error:
            return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("what", "named"), [("dense", "dense parameters"), ("table", "rows of the table item")])
def test_copies_that_differ_stop_the_run(
    what: str, named: str, config: Config, store_path: Path, tmp_path: Path
) -> None:
    for message in run_ranks(2, change_a_copy, config, store_path, tmp_path, what):
        assert f"the {named} of rank 1 differ from those of rank 0 after step 4" in message


def compare_changed_copies(config: Config, store: Path, out: Path) -> dict[str, str]:
    """Change one bit in rank 1's copy of each tensor in turn; return what the comparison raises, by tensor."""
    with connected_world() as world:
        trainer = make_trainer(config, store, out, world, groups=2)
        trainer.step(trainer.loader.batch(0, 0))
        stepper, slots = trainer.stepper, torch.arange(trainer.tables.weights[0].shape[0])
        dense, rows = stepper.dense_optimizer.state()["position"], trainer.tables.groups[0].optimizer.state()
        places = {"unchanged": None, "weight": trainer.tables.weights[0], "position": trainer.model.position}
        message = {}
        for name, tensor in {**places, **dense, **rows}.items():
            if world.rank == 1 and tensor is not None:
                tensor.detach().view(-1).view(torch.int32)[0] ^= 1
            try:
                stepper.check_replicas([slots], 1)
                message[name] = ""
            except ReplicaError as error:
                message[name] = str(error)
            if world.rank == 1 and tensor is not None:
                tensor.detach().view(-1).view(torch.int32)[0] ^= 1
    return message


def test_one_bit_of_any_copy_is_noticed(config: Config, store_path: Path, tmp_path: Path) -> None:
    named = {
        "position": "dense parameters",
        "step": "moments of the dense parameters",
        "exp_avg": "moments of the dense parameters",
        "exp_avg_sq": "moments of the dense parameters",
        "weight": "rows of the table item",
        "mean": "moments of the table item",
        "square": "moments of the table item",
        "num_steps": "moments of the table item",
    }
    for message in run_ranks(2, compare_changed_copies, config, store_path, tmp_path):
        assert message.pop("unchanged") == ""
        assert message.keys() == named.keys()
        for place, name in named.items():
            assert f"the {name} of rank 1 differ from those of rank 0 after step 1" in message[place]


def leave_early(config: Config, store: Path, out: Path) -> tuple[str, float]:
    """Rank 1 leaves before step 3; return what the others raise and after how long."""
    with connected_world() as world:
        trainer = make_trainer(config, store, out, world)
        left = time.monotonic()
        try:
            for batch in trainer.loader:
                if trainer.progress.step == 2:
                    left = time.monotonic()
                    if world.rank == 1:
                        return "left", 0.0
                trainer.step(batch)
        except RankLost as error:
            return str(error), time.monotonic() - left
    return "", 0.0


def test_the_end_of_a_rank_is_noticed_at_once(config: Config, store_path: Path, tmp_path: Path) -> None:
    for message, seconds in run_ranks(3, leave_early, config, store_path, tmp_path):
        assert message == "left" or ("lost contact with another rank" in message and "--resume" in message)
        assert seconds < 20


def wait_and_abort() -> tuple[str, bool]:
    """A thread of rank 0 waits for a message that rank 1 never sends, until its process groups are aborted; return what
    it raises, and whether the ranks can still communicate otherwise."""
    with connected_world() as world:
        mesh = Mesh.build(world, choose_mesh(world.size, world.size), "cpu")
        channel, raised = mesh.channel(), []

        def listen() -> None:
            try:
                with communicating():
                    dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=channel.member_ranks)
            except RankLost as error:
                raised.append(str(error))

        if world.rank == 0:
            thread = threading.Thread(target=listen, daemon=True)
            thread.start()
            time.sleep(0.2)
            assert thread.is_alive()
            channel.abort()
            thread.join(60)
            assert not thread.is_alive(), "it still waits"
        return "".join(raised), len(world.gather_objects(1)) == world.size


def test_a_thread_that_waits_for_a_message_can_be_freed() -> None:
    (raised, talking), (_, also) = run_ranks(2, wait_and_abort)
    assert "rank 0 lost contact with another rank: this rank has closed its own connections" in raised
    assert talking and also


def connect_or_not(seconds: float, port: int) -> str:
    """Rank 1 never connects; return the error of the others, which start to wait when both are running.

    The test hosts the store, as torchrun's agent does, so it exists before the first rank and after the last.
    """
    rank = os.environ["RANK"]
    if rank == "1":
        return ""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    store.set(f"up-{rank}", "")
    store.wait(["up-0", "up-2"])
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        with connected_world(start_timeout=seconds):
            return "all connected"
    except UserError as error:
        return str(error)


def fail_alone(config: Config, store: Path, out: Path) -> tuple[str, str]:
    """Only rank 1 raises a UserError; return what is raised."""

    try:
        with connected_world() as world, world.reporting_errors_once():
            if world.rank == 1:
                raise UserError("my device is broken; replace it.")
            world.barrier()
    except UserError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_of_one_rank_is_reported_by_the_others(config: Config, store_path: Path, tmp_path: Path) -> None:
    (kind, message), (silent, _) = run_ranks(2, fail_alone, config, store_path, tmp_path)
    assert (kind, silent) == ("RankLost", "ReportedByOtherRank")
    assert "another rank: rank 1 ended with: my device is broken; replace it. The run continues" in message


def test_ranks_that_never_connect_are_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    message = run_ranks(3, connect_or_not, 3.0, store.port)
    assert "rank 1 of 3 did not connect within 3 s" in message[0]
    assert "rank 1 of 3 did not connect within 3 s" in message[2]


def save_on_a_full_disk(config: Config, store: Path, out: Path) -> str:
    """Rank 1 cannot write its part of the second checkpoint; return what is raised."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with connected_world() as world:
        trainer = make_trainer(config, store, out, world)
        trainer.checkpoints.save(trainer.state(), trainer.progress)
        trainer.step(trainer.loader.batch(0, 0))
        broken = {"write_part": full} if world.rank == 1 else {"Copies": Copies}
        try:
            with mock.patch.multiple(checkpoint_writer, **broken):
                trainer.checkpoints.save(trainer.state(), trainer.progress)
        except UserError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def test_a_full_disk_on_one_rank_leaves_the_previous_checkpoint(
    config: Config, store_path: Path, tmp_path: Path
) -> None:
    message, silent = run_ranks(2, save_on_a_full_disk, config, store_path, tmp_path)
    assert re.search(r"rank 1 of 2.*checkpoints/step-1 could not be written, because the disk is full", message), (
        message
    )
    assert silent.startswith("ReportedByOtherRank")
    names = [entry.name for entry in (tmp_path / "checkpoints").iterdir()]
    assert names == ["step-0"]
