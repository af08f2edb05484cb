"""A save that is killed at any of its file operations, on one rank or two, loses nothing; nor does a full disk.

The operations are real, in forked processes, and so are the kills. An audit hook counts what creates, renames or
removes something; flushes and the pieces of a tensor file, which have no audit event, are counted where they are made.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from turbogr import checkpoint_writer, checkpoints
from turbogr.checkpoints import Checkpoints
from turbogr.checksums import FileChecksum
from turbogr.errors import RankLost, UserError
from turbogr.parallel import safetensors_file
from turbogr.parallel.tensor_files import Rows
from turbogr.parallel.world import World
from turbogr.progress import Progress

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((6, 4), float(step)), "b": torch.tensor(float(step))}}


def save(run: Path, step: int, world: World | None = None, background: bool = False) -> None:
    mine = Checkpoints(run, 2, world)
    mine.save(state_of(step), Progress(step=step, best_step=1, best_value=0.5), background=background)
    mine.finish()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run with checkpoints of steps 1, the best one, 2 and 3; to save step 4 removes step 2.

    It is in memory where that is a file system, because hundreds of saves flush thousands of files.
    """
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    for step in (1, 2, 3):
        save(folder / "run", step)
    assert Checkpoints(folder / "run").steps() == [1, 2, 3]
    yield folder / "run"
    shutil.rmtree(folder)


def check(run: Path, saved: int = 4) -> None:
    """The next start finds the last complete checkpoint, whole, and can save."""
    found = Checkpoints(run)
    found.sweep()
    newest = found.newest_intact()
    assert newest in (saved - 1, saved) and found.best() == 1
    for step in found.steps():
        assert found.find_damages(step) == []
        state = state_of(0)
        assert found.restore(state, step).step == step
        assert torch.equal(state["model"]["w"], state_of(step)["model"]["w"]) and state["model"]["b"] == step
    save(run, saved + 1)
    assert Checkpoints(run).newest_intact() == saved + 1
    assert [path.name for path in (run / "checkpoints").rglob("*") if ".part" in path.name or ".old" in path.name] == []


def counting(run: Path, kill_at: int | None) -> list[str]:
    """Count file operations in the run's folder from now on, in all threads; end this process before one of them."""
    counted: list[str] = []

    def count(name: str) -> None:
        counted.append(name)
        if len(counted) - 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        changes = event in CHANGES and isinstance(args[0], str | Path) and str(args[0]).startswith(str(run))
        if changes and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            count(f"{event} {os.path.basename(args[0])}")

    fsync, update = os.fsync, FileChecksum.update

    def flushed(handle: int) -> None:
        count("fsync")
        fsync(handle)

    def piece(self: FileChecksum, data: memoryview) -> None:
        count("write")
        update(self, data)

    os.fsync, FileChecksum.update = flushed, piece  # type: ignore[assignment, method-assign]
    safetensors_file.BLOCK = 64
    sys.addaudithook(audit)
    return counted


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """Start a process that calls `work`; return its id and where its result comes."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process:
        theirs.close()
        return process, ours
    try:
        theirs.send(work())
    except BaseException as error:
        theirs.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def ended(process: int, pipe: Any) -> tuple[int, Any]:
    """Wait for the process; return the signal that ended it, and its result if there is one."""
    _, status = os.waitpid(process, 0)
    result = pipe.recv() if pipe.poll() and os.WIFEXITED(status) else None
    pipe.close()
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, result


def fresh_copies(run: Path) -> Iterator[Path]:
    """Yield endless copies of a run."""
    number = 0
    while True:
        number += 1
        copy = run.with_name(f"copy-{number}")
        shutil.copytree(run, copy)
        yield copy
        shutil.rmtree(copy)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_killed_at_any_file_operation(run: Path, background: bool) -> None:
    copies = fresh_copies(run)

    def killed(folder: Path, at: int | None) -> tuple[int, Any]:
        def work() -> list[str]:
            counted = counting(folder, at)
            save(folder, 4, background=background)
            return list(counted)

        return ended(*forked(work))

    status, operations = killed(next(copies), None)
    assert status == 0 and len(operations) > 25, operations
    assert {operation.split()[0] for operation in operations} >= {"open", "os.rename", "fsync", "write", "os.mkdir"}
    for at in range(len(operations)):
        folder = next(copies)
        status, _ = killed(folder, at)
        assert status == signal.SIGKILL, (at, operations[at])
        check(folder)


@dataclass(frozen=True)
class PipeWorld(World):
    """Two ranks that gather over a pipe."""

    pipe: Any = None

    def gather_objects(self, value: Any) -> list[Any]:
        try:
            self.pipe.send(value)
            other = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise RankLost("the other rank has ended") from error
        return [value, other] if self.rank == 0 else [other, value]


def halves(state: Any, rank: int) -> dict[str, Rows]:
    """What each of two ranks writes: half of the rows."""
    w = state["model"]["w"]
    mine = {"model.w": Rows(w[3 * rank : 3 * rank + 3], tuple(w.shape), 3 * rank)}
    return mine | ({"model.b": Rows(state["model"]["b"], ())} if rank == 0 else {})


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_of_two_ranks_of_which_one_is_killed_at_any_file_operation(
    run: Path, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "own_rows", halves)
    copies = fresh_copies(run)

    def killed(folder: Path, at: int | None) -> tuple[list[int], list[Any]]:
        pipes = multiprocessing.Pipe()

        def start(rank: int) -> tuple[int, Any]:
            def work() -> list[str]:
                pipes[1 - rank].close()
                counted = counting(folder, at if rank == victim else None)
                save(folder, 4, PipeWorld(rank, 2, pipe=pipes[rank]), background=True)
                return list(counted)

            return forked(work)

        started = [start(rank) for rank in (0, 1)]
        for pipe in pipes:
            pipe.close()
        ends = [ended(*each) for each in started]
        return [status for status, _ in ends], [result for _, result in ends]

    statuses, results = killed(next(copies), None)
    assert statuses == [0, 0], results
    operations = results[victim]
    assert len(operations) > (25 if victim == 0 else 6), operations
    monkeypatch.undo()
    for at in range(len(operations)):
        folder = next(copies)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "own_rows", halves)
            statuses, results = killed(folder, at)
        assert statuses[victim] == signal.SIGKILL, (at, operations[at], results)
        other = results[1 - victim]
        assert not isinstance(other, str) or other.startswith("RankLost"), (at, operations[at], other)
        check(folder)


# Disks that are full or read-only, also for root.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(small_disk: Path, background: bool) -> None:
    run = small_disk / "run"
    for step in (1, 2, 3):
        save(run, step)
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk / 'filler'}"], capture_output=True)
    with pytest.raises(UserError, match=r"/step-4 could not be written, because the disk is full; .*") as failed:
        save(run, 4, background=background)
    assert ".part" not in str(failed.value)
    assert Checkpoints(run).newest_intact() == 3
    (small_disk / "filler").unlink()
    check(run)


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    run = small_disk / "run"
    for step in (1, 2, 3):
        save(run, step)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"Read-only file system: '.*/step-4'"):
        save(run, 4)
    assert Checkpoints(run).newest_intact() == 3
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    check(run)


# What is saved is the state of its step, however it changes meanwhile.


def test_a_save_in_the_background_has_the_state_of_its_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_writer.write_part
    state, mine, copies = state_of(4), Checkpoints(run), []

    def late(parts: Any, *others: Any) -> None:
        for tensor in state["model"].values():
            tensor.fill_(-1.0)  # training goes on before the first byte is written
        copies.append([part.rows.data_ptr() for part in parts.values()])
        write(parts, *others)

    monkeypatch.setattr(checkpoint_writer, "write_part", late)
    progress = Progress(step=4, best_step=1)
    mine.save(state, progress, background=True)
    progress.step, progress.tokens = 5, 7
    mine.finish()
    check(run)
    assert Checkpoints(run).progress(4 if 4 in Checkpoints(run).steps() else 5).tokens == 0
    mine.save(state_of(6), Progress(step=6, best_step=1), background=True)
    mine.finish()
    assert copies[0] == copies[-1], "buffers are used again"


def test_the_first_save_uses_buffers_that_were_prepared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, mine = checkpoint_writer.write_part, Checkpoints(run)
    written: list[list[int]] = []

    def noting(parts: Any, *others: Any) -> None:
        written.append([part.rows.data_ptr() for part in parts.values()])
        write(parts, *others)

    monkeypatch.setattr(checkpoint_writer, "write_part", noting)
    mine.prepare(state_of(4))
    mine.wait_until_prepared()
    prepared = {buffer.data_ptr() for buffer in mine._copies._buffers.values()}
    assert prepared
    mine.save(state_of(4), Progress(step=4, best_step=1), background=True)
    mine.finish()
    assert set(written[0]) == prepared
    check(run)


def test_every_page_of_a_prepared_buffer_is_touched_until_training_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "_PAGES_AT_ONCE", 2)
    copies, page = checkpoint_writer.Copies(), checkpoint_writer._PAGE_BYTES
    for shape, dtype in (((5, page // 2 + 1), torch.bfloat16), ((0, 3), torch.float32), ((), torch.int64)):
        buffer = torch.ones(shape, dtype=torch.uint8).to(dtype)
        assert copies._touch(buffer)
        changed = buffer.view(-1).view(torch.uint8) if buffer.numel() else buffer.view(-1)
        assert not changed[::page].any()
    buffer = torch.full((9 * page,), 255, dtype=torch.uint8)
    copies.end_preparing()
    assert not copies._touch(buffer) and bool((buffer == 255).all())


def test_without_memory_nothing_is_prepared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "available_memory", lambda: 10)
    mine = Checkpoints(run)
    mine.prepare(state_of(4))
    mine.wait_until_prepared()
    assert not mine._copies._buffers


def test_an_error_of_the_writer_is_known_early_and_raised_by_the_next_call(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    mine = Checkpoints(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_part", full)
        mine.save(state_of(4), Progress(step=4, best_step=1), background=True)
        pending = mine._pending
        assert pending is not None
        pending.written.wait()
        assert mine.failed
    with pytest.raises(UserError, match=r"/step-4 could not be written, because the disk is full"):
        mine.save(state_of(5), Progress(step=5, best_step=1), background=True)
    assert not mine.failed
    check(run)


def test_without_memory_for_a_copy_training_waits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "available_memory", lambda: 10)
    mine = Checkpoints(run)
    with pytest.warns(match="checkpoints are written while training waits"):
        mine.save(state_of(4), Progress(step=4, best_step=1), background=True)
    assert mine._pending is not None and mine._pending.written.is_set()
    mine.finish()
    check(run)
