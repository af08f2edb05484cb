"""A process that computes numbered random cases, and one that watches it and knows at which case it has ended.

An interrupted command goes on where it stopped, and `--only N` repeats case N, because a case is a function of its seed
and number.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What became of a case of a `kind`: "computed", "refused", ...; `problem` is what should not be."""

    result: str
    kind: str
    problem: str | None = None
    compared: bool = False


@dataclass(frozen=True)
class Cases:
    """Random cases of the program `module`. `settle` prepares a block of `block` cases and returns the block's name."""

    module: str
    identity: Mapping[str, Any]
    settle: Callable[[int], str]
    compute: Callable[[int, int], Outcome]
    block: int = 1000
    describe: Callable[[int, int], str] = lambda seed, number: ""


def run_cases(cases: Cases, number: int) -> int:
    """Run the program of these cases, `number` of them by default; return its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {cases.module}")
    parser.add_argument("--inputs", type=int, default=number, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record; an interrupted command goes on there")
    parser.add_argument("--only", type=int, metavar="N", help="compute input N alone and say what comes out")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--board", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(cases, arguments)
        return 0
    if arguments.only is not None:
        print(f"{cases.settle(arguments.only // cases.block)}; {cases.describe(arguments.seed, arguments.only)}")
        outcome = cases.compute(arguments.seed, arguments.only)
        print(f"{outcome.kind}: {outcome.result}; {outcome.problem or 'as it should be'}")
        return 1 if outcome.problem else 0
    return _watch(cases, arguments)


def _watch(cases: Cases, arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    identity = {**cases.identity, "seed": arguments.seed, "inputs": arguments.inputs, "processes": arguments.processes}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        stem = Path(folder, "fuzz.json") if arguments.json is None else arguments.json
        parts = [_start(cases, arguments, identity, stem, Path(folder), part) for part in range(arguments.processes)]
        for _, _, process in parts:
            started.callback(_end, process)
        failures, states = [], []
        for path, board, process in parts:
            _, words = process.communicate()
            states.append(json.loads(path.read_text()))
            failures += states[-1]["failures"]
            if process.returncode or words.strip():
                (at,) = struct.unpack("q", board.read_bytes())
                failures.append({"input": at, "status": process.returncode, "problem": words[-4000:]})
        record = _record(cases, identity, states, failures)
        for failure in failures:
            print(f"input {failure['input']}: {failure['problem']}")
        found = ", ".join(f"{count} {result}" for result, count in record["results"].items())
        print(f"{record['inputs']} inputs: {found}; {record['compared']} compared; {len(failures)} failures")
        if arguments.json is not None and record["inputs"] >= arguments.inputs and not failures:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")
            for path, _, _ in parts:
                path.unlink()
    return 1 if failures else 0


def _start(
    cases: Cases, arguments: argparse.Namespace, identity: Mapping[str, Any], stem: Path, folder: Path, part: int
) -> tuple[Path, Path, subprocess.Popen[str]]:
    """Start a process; return the file with what it has done, that with the number of its case, and the process."""
    path, board = stem.with_name(f"{stem.name}.partial-{part}"), folder / f"number-{part}"
    path.write_text(json.dumps(_opened(path, identity)))
    board.write_bytes(struct.pack("q", -1))
    command = [sys.executable, "-m", cases.module, "--worker", str(path), "--board", str(board), "--part", str(part)]
    options = {"inputs": arguments.inputs, "seed": arguments.seed, "processes": arguments.processes}
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return path, board, subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _opened(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    fresh = {"blocks": 0, "done": 0, "seconds": 0.0, "failures": [], "results": {}, "compared": {}, "settings": {}}
    if not path.exists():
        return {"identity": identity, **fresh}
    found: dict[str, Any] = json.loads(path.read_text())
    if found["identity"] != identity:
        raise SystemExit(f"{path} is of {found['identity']}, not {identity}; remove it or name another --json")
    return found


def _record(
    cases: Cases, identity: Mapping[str, Any], states: Sequence[Mapping[str, Any]], failures: Sequence[Any]
) -> dict[str, Any]:
    by_kind: dict[str, Counter[str]] = {}
    settings: Counter[str] = Counter()
    for state in states:
        settings.update(state["settings"])
        for result, kinds in state["results"].items():
            by_kind.setdefault(result, Counter()).update(kinds)
    return {
        "command": shlex.join(["python", "-m", cases.module, *sys.argv[1:]]),
        **identity,
        "inputs": sum(state["done"] for state in states),
        "failures": list(failures),
        "results": {result: kinds.total() for result, kinds in by_kind.items()},
        "compared": sum(sum(state["compared"].values()) for state in states),
        "processor_seconds": round(sum(state["seconds"] for state in states), 1),
        "by_kind": {result: dict(sorted(kinds.items())) for result, kinds in by_kind.items()},
        "by_setting": dict(sorted(settings.items())),
    }


def _work(cases: Cases, arguments: argparse.Namespace) -> None:
    """Compute every `processes`-th block of cases."""
    path: Path = arguments.worker
    state = json.loads(path.read_text())
    results = {result: Counter(kinds) for result, kinds in state["results"].items()}
    compared, settings = Counter(state["compared"]), Counter(state["settings"])
    with arguments.board.open("r+b") as file:
        board = mmap.mmap(file.fileno(), 8)
    before = float(state["seconds"])
    num_blocks = -(-arguments.inputs // cases.block)
    for block in range(arguments.part, num_blocks, arguments.processes)[state["blocks"] :]:
        first, last = block * cases.block, min((block + 1) * cases.block, arguments.inputs)
        settings[cases.settle(block)] += last - first
        for number in range(first, last):
            struct.pack_into("q", board, 0, number)
            outcome = cases.compute(arguments.seed, number)
            results.setdefault(outcome.result, Counter())[outcome.kind] += 1
            compared[outcome.kind] += outcome.compared
            if outcome.problem:
                state["failures"].append({"input": number, "kind": outcome.kind, "problem": outcome.problem})
        state |= {"results": results, "compared": compared, "settings": settings}
        state |= {"blocks": state["blocks"] + 1, "done": state["done"] + last - first}
        state["seconds"] = before + time.process_time()
        Path(f"{path}.new").write_text(json.dumps(state))
        os.replace(f"{path}.new", path)
