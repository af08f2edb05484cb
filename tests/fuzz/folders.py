"""Mutated stores, run folders and recipes: no command may crash, hang, run code from them or write elsewhere.

    python -m tests.fuzz.folders --inputs 10000 --json fuzz_folders.json

A file of a sound folder is damaged (bits, bytes, length, name, another file in its place, a pickle that would run a
command), or a value of a JSON or YAML file is replaced, and its checksums are made right again, so that the damage
reaches what reads it. Then a command opens it. Its status must be 0, 1 or 2; damaged bytes that have a checksum must
be found by `inspect --verify`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tests.fuzz.watching import Cases, Outcome, run_cases
from tests.training.conftest import make_config, write_store
from turbogr import cli, machine
from turbogr.checksums import FileChecksum, is_sealed, sealed
from turbogr.parallel.tensor_files import load_tensors, stored_names
from turbogr.training.run import train

_LONGEST_SECONDS = 300  # on a machine that does much else
_MOST_MEMORY = 12 << 30
_JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3.5, 2**31, 2**63, -(2**70), 1e308, float("nan"), float("inf"), "", "x", "1",
    "../..", "/", "\x00", "\x1b]0;x\x07", "é\ud800", "a" * 5000, "torch.float32", "step-12",
    [], {}, [[]], [None], {"x": {}}, [1, 2, 3],
)  # fmt: skip
_JUNK_TEXT = (
    b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"&a [*a]", b"!!python/object/apply:os.system ['x']",
    b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", b"\x00" * 64, b"1e999999",
)  # fmt: skip


class _Payload:
    """What a pickle from somebody else may hold: unpickled by plain pickle, it runs a command."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch payload-ran",))


class _Base:
    """Sound folders: a store, runs of a network and of a simple method, and one with checkpoints of release 0.1."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="turbogr-fuzz-"))
        self.sound, self.work = self.folder / "sound", self.folder / "work"
        store = write_store(self.sound / "store", num_users=20)
        config = make_config()
        config = replace(config, optimizer=replace(config.optimizer, schedule="constant"))
        config = replace(config, evaluate=replace(config.evaluate, baselines=()))
        train(config, store.path, self.sound / "run", overrides=["train.epochs=2", "train.checkpoint_every=1"])
        train(config, store.path, self.sound / "simple", overrides=["model.name=ease", "train.epochs=", "train.steps="])
        shutil.copytree(self.sound / "run", self.sound / "old")
        for folder in (self.sound / "old/checkpoints").glob("step-*"):
            state = {name: torch.empty(0) for name in stored_names(folder)}
            _as_release_0_1(folder, state)
        self.commands: dict[str, list[list[str]]] = {}
        work = self.work
        data, out = str(work / "store"), str(work / "out")
        for name in ("run", "simple", "old"):
            run = str(work / name)
            again = ["train", f"{run}/config.yaml", "--data", data]
            self.commands[name] = [
                ["inspect", run, "--verify"],
                ["evaluate", run],
                ["evaluate", run, "--which", "last"],
                ["recommend", run, "--k", "3", "--out", f"{out}.csv"],
                ["report", run],
                [*again, "--out", run, "--resume", "--set", "train.epochs=3"],
                [*again, "--out", out, "--init-from", run, "--set", "train.epochs=1"],
            ]
        recipe = str(work / "run/config.yaml")
        short = ["--set", "train.epochs=", "--set", "train.steps=1"]
        self.commands["store"] = [
            ["inspect", data],
            ["inspect", data, "--verify"],
            ["train", recipe, "--data", data, "--out", out, *short],
            ["evaluate", str(work / "run")],
        ]
        self.commands["recipe"] = [["train", str(work / "recipe.yaml"), "--data", data, "--out", out, *short]]

    def renew(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.sound, self.work, symlinks=True)
        shutil.copy(self.work / "run/config.yaml", self.work / "recipe.yaml")


def _as_release_0_1(folder: Path, state: dict[str, Any]) -> None:
    """Replace the tensors of a checkpoint by the files that earlier releases wrote."""
    from turbogr.parallel.tensor_files import _stored

    state = {name: torch.empty(stored.shape) for name, stored in _stored(folder).items()}
    load_tensors(state, folder)
    for path in folder.glob("part-*"):
        path.unlink()
    save(state, storage_writer=FileSystemWriter(folder, overwrite=False), no_dist=True)


class _State:
    base: _Base | None = None
    watched: Path | None = None
    violations: list[str] = []  # noqa: RUF012


def settle(block: int) -> str:
    """Make the sound folders, once."""
    if _State.base is None:
        warnings.simplefilter("ignore")
        machine.gemm_peak = lambda *args, **kwargs: 1e11
        torch.set_num_threads(1)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _State.base = _Base()
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
        sys.addaudithook(_audit)
    return "one process"


def close() -> None:
    """Remove the folders."""
    if _State.base is not None:
        shutil.rmtree(_State.base.folder, ignore_errors=True)
        _State.base = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what a folder from somebody else must not make a command do."""
    watched = _State.watched
    if watched is None:
        return
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"):
        _State.violations.append(f"{event} {arguments!r}"[:300])
    elif event == "exec" and str(watched) in getattr(arguments[0], "co_filename", ""):
        _State.violations.append(f"code of {arguments[0].co_filename} ran")
    elif event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((str(watched), "/dev/", "/proc/", tempfile.gettempdir())):
            _State.violations.append(f"{path} was opened for writing")


@contextmanager
def _watching(folder: Path) -> Iterator[list[str]]:
    _State.violations, _State.watched = [], folder
    try:
        yield _State.violations
    finally:
        _State.watched = None


class _TooLong(BaseException):
    pass


def _too_long(*_: Any) -> None:
    raise _TooLong


def plan(seed: int, number: int) -> tuple[random.Random, str, list[str]]:
    """Return the generator of a case, what is mutated, and the command that opens it."""
    assert _State.base is not None
    choose = random.Random((seed << 40) + number)
    target = choose.choice(("store", "run", "run", "old", "simple", "recipe"))
    return choose, target, choose.choice(_State.base.commands[target])


def describe(seed: int, number: int) -> str:
    choose, target, command = plan(seed, number)
    assert _State.base is not None
    _State.base.renew()
    return f"{' '.join(command)}: {mutate(choose, _State.base.work, target)[0]}"


def compute(seed: int, number: int) -> Outcome:
    """Mutate a folder and open it by a command."""
    choose, target, command = plan(seed, number)
    base = _State.base
    assert base is not None
    base.renew()
    what, has_checksum = mutate(choose, base.work, target)
    printed = io.StringIO()
    signal.signal(signal.SIGALRM, _too_long)
    os.chdir(base.folder)
    signal.alarm(_LONGEST_SECONDS)
    try:
        with _watching(base.folder) as violations, redirect_stdout(printed), redirect_stderr(printed):
            status = cli.main(command)
    except _TooLong:
        return Outcome("stopped", target, f"{command}, {what}: no end after {_LONGEST_SECONDS} s")
    except (Exception, SystemExit):
        return Outcome("crashed", target, f"{command}, {what}: {traceback.format_exc()[-1500:]}")
    finally:
        signal.alarm(0)
    problem = None
    if status not in (0, 1, 2):
        problem = f"status {status}"
    elif violations or (base.folder / "payload-ran").exists():
        problem = f"{violations or 'the payload ran'}"
    elif "Traceback" in printed.getvalue():
        problem = "a traceback"
    elif status == 0 and has_checksum and "--verify" in command:
        problem = "the damage is not found"
    if problem:
        problem = f"{command}, {what}: {problem}; {printed.getvalue()[-500:]}"
    return Outcome("opened" if status == 0 else "refused", f"{target} by {command[0]}", problem)


# Mutations.


def mutate(choose: random.Random, work: Path, target: str) -> tuple[str, bool]:
    """Damage a file; return what was done, and whether checksums must find it."""
    if target == "recipe":
        path = work / "recipe.yaml"
    else:
        files = sorted(path for path in (work / target).rglob("*") if path.is_file())
        path = choose.choice(files)
    before = path.read_bytes()
    structured = path.suffix in (".json", ".jsonl", ".yaml") and choose.random() < 0.7
    kind = _replace_value if structured else choose.choice(_OF_BYTES)
    what = kind(choose, path)
    changed = not path.is_file() or path.read_bytes() != before
    guarded = changed and not structured and (path.parent.name.startswith("step-") or path.parent == work / "store")
    # Releases before 0.2 have no checksums of whole files, and what is known of the items may be removed.
    guarded = guarded and target != "old" and path.name != "item-info.parquet"
    if target != "recipe" and path.is_file() and choose.random() < 0.6 and _make_right(path):
        what, guarded = f"{what}, with right checksums", False
    return f"{path.relative_to(work)}: {what}", guarded


def _flip(choose: random.Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    if data:
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)
    return "a flipped bit"


def _scatter(choose: random.Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    for _ in range(min(len(data), 20)):
        data[choose.randrange(min(len(data), 300))] = choose.randrange(256)
    path.write_bytes(data)
    return "random bytes near the start"


def _cut(choose: random.Random, path: Path) -> str:
    data = path.read_bytes()
    path.write_bytes(data[: choose.randrange(len(data) + 1)])
    return "cut short"


def _extend(choose: random.Random, path: Path) -> str:
    path.write_bytes(path.read_bytes() + choose.choice((b"\0", b"\n", b"{}", b"x" * 1000)))
    return "longer"


def _remove(choose: random.Random, path: Path) -> str:
    path.unlink()
    return "removed"


def _folder(choose: random.Random, path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "a folder in its place"


def _link(choose: random.Random, path: Path) -> str:
    path.unlink()
    path.symlink_to(choose.choice(("/nowhere", path.name, "/dev/null")))
    return "a link in its place"


def _other_file(choose: random.Random, path: Path) -> str:
    files = sorted(other for other in path.parent.rglob("*") if other.is_file())
    other = choose.choice(files)
    path.write_bytes(other.read_bytes())
    return f"{other.name} in its place"


def _text(choose: random.Random, path: Path) -> str:
    text = choose.choice(_JUNK_TEXT)
    path.write_bytes(text)
    return f"{text[:60]!r} in its place"


def _pickle(choose: random.Random, path: Path) -> str:
    data = pickle.dumps(_Payload())
    path.write_bytes(data.ljust(path.stat().st_size, b"\0"))
    return "a pickle that runs a command in its place"


_OF_BYTES: tuple[Callable[[random.Random, Path], str], ...] = (
    _flip, _flip, _scatter, _cut, _extend, _remove, _folder, _link, _other_file, _text, _pickle,
)  # fmt: skip


def _replace_value(choose: random.Random, path: Path) -> str:
    """Replace, remove or add a value somewhere in a JSON or YAML file."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    if not lines:
        return "empty as before"
    at = choose.randrange(len(lines))
    record = yaml.safe_load(lines[at]) if path.suffix == ".yaml" else json.loads(lines[at])
    holder, keys = record, []
    while isinstance(holder, dict | list) and holder:
        key = choose.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        keys.append(key)
        if not isinstance(holder[key], dict | list) or not holder[key] or choose.random() < 0.25:
            break
        holder = holder[key]
    if not keys:
        return "empty as before"
    junk = choose.choice(_JUNK)
    if path.name in ("config.yaml", "recipe.yaml") and isinstance(junk, int | float) and abs(junk) > 1e9:
        junk = -7  # a model of so many blocks is allowed, and takes its time
    action = choose.choice(("replace", "replace", "replace", "remove", "add"))
    if action == "replace":
        holder[keys[-1]] = junk
    elif action == "remove":
        del holder[keys[-1]]
    elif isinstance(holder, dict):
        holder[choose.choice(("x", "", "step", "../x", "a b"))] = junk
    else:
        holder.append(junk)
    if path.suffix == ".yaml":
        lines[at] = yaml.safe_dump(record)
    elif is_sealed(path.read_bytes()) and isinstance(record, dict) and record:
        lines[at] = json.dumps(record, indent=2) + "\n"
    else:
        lines[at] = json.dumps(record) + "\n" * (path.suffix != ".jsonl")
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass") + b"\n" * (path.suffix == ".jsonl"))
    return f"{action} {'.'.join(map(str, keys))} by {str(junk)[:30]!r}"


def _make_right(path: Path) -> bool:
    """Make the checksums right that a file is part of; whether there are such."""
    data = path.read_bytes()
    with suppress(ValueError, UnicodeError, RecursionError):
        if path.suffix == ".json" and is_sealed(data):
            record = json.loads(data)
            if isinstance(record, dict) and len(record) > 1 and record.pop("crc32", None):
                path.write_text(sealed(record))
                return True
    if path.suffix == ".safetensors":
        listed = path.with_suffix(".json")
        record = json.loads(listed.read_text())
        record.pop("crc32")
        record["file"] = FileChecksum.of(path).to_record()
        listed.write_text(sealed(record))
        return True
    listed = path.parent / "checksums.json"
    if listed.exists() and path != listed:
        record = json.loads(listed.read_text())
        record.pop("crc32")
        if path.name in record["files"]:
            record["files"][path.name] = FileChecksum.of(path).to_record()
            listed.write_text(sealed(record))
            return True
    return False


if __name__ == "__main__":
    try:
        sys.exit(
            run_cases(
                Cases(
                    module="tests.fuzz.folders",
                    identity={},
                    settle=settle,
                    compute=compute,
                    block=50,
                    describe=describe,
                ),
                500,
            )
        )
    finally:
        close()
