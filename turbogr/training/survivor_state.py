"""What the remaining ranks keep when one is lost, so that the job goes on from the last step, not the last checkpoint.

Connections are broken then, so nothing can be agreed: every rank that still runs writes its own part of the state into
RUN/survivors, if all updates of its last step are done. The parts are enough if, of some step, there is one of every
member of a group: groups hold copies of the same table, and every rank has all dense parameters. A resumed run takes
the newest such state if no checkpoint is as new, on any number of ranks, and saves it as a checkpoint at once.

A part's name ends with the checksum of its content, so a damaged or half-written one is not taken.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbogr.files import atomic_file
from turbogr.progress import Progress
from turbogr.training.step import Stepper

FOLDER = "survivors"
_PART = re.compile(r"step-(\d+)-member-(\d+)-of-(\d+)-group-\d+-([0-9a-f]{8})\.pt")
_BLOCK = 1 << 22


def save_part(run: Path, stepper: Stepper, progress: Progress, past_weights: Sequence[Sequence[Tensor]]) -> Path:
    """Write this rank's part of the state after a step, without the other ranks; return the file.

    `past_weights` are this rank's rows of past versions of the tables, as `Executor.past_weights` returns them.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    mesh, folder = stepper.mesh, run / FOLDER
    folder.mkdir(exist_ok=True)
    content = {
        "progress": dataclasses.replace(progress, earlier_tables=len(past_weights)).to_json(),
        "dense": _dense(stepper),
        "tables": {
            name: {"rows": rows, "tensors": {kind: tensor[slots.to(tensor.device)] for kind, tensor in tensors.items()}}
            for name, slots, rows, tensors in _tables(stepper, past_weights)
        },
    }
    name = f"step-{progress.step}-member-{mesh.member}-of-{mesh.members}-group-{mesh.group}"
    with atomic_file(folder / f"{name}.pt") as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError as error:  # so torch reports that writing has failed, and does not say why
            raise OSError(errno.EIO, "it could not be written: the disk may be full", str(temporary)) from error
        checksum = _checksum(temporary)
    final = folder / f"{name}-{checksum}.pt"
    (folder / f"{name}.pt").rename(final)
    return final


def newest_parts(run: Path, after: int) -> list[Path]:
    """Return one sound part of every member of the newest step later than `after` that has them all; else none."""
    found: dict[tuple[int, int], dict[int, list[Path]]] = {}
    for path in sorted((run / FOLDER).glob("step-*.pt")):
        if match := _PART.fullmatch(path.name):
            step, member, members = (int(number) for number in match.groups()[:3])
            found.setdefault((step, members), {}).setdefault(member, []).append(path)
    for (step, members), parts in sorted(found.items(), reverse=True):
        if step > after and len(parts) == members:
            sound = [next((path for path in paths if _is_sound(path)), None) for paths in parts.values()]
            if None not in sound:
                return [path for path in sound if path is not None]
    return []


def remove_parts(run: Path) -> None:
    """Remove all parts."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)


def load_parts(paths: Sequence[Path], run: Path, stepper: Stepper) -> tuple[Progress, list[list[Tensor]]]:
    """Take over the state of `newest_parts`; return its progress and this rank's rows of past versions of the tables.

    Every rank reads what it needs from all parts.
    """
    past: list[list[Tensor]] = []
    progress = Progress()
    for number, path in enumerate(paths):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if number == 0:
            progress = Progress.from_json(content["progress"], str(path))
            past = [
                [torch.empty_like(weight) for weight in stepper.tables.weights] for _ in range(progress.earlier_tables)
            ]
            _copy(content["dense"], _dense(stepper))
        for name, slots, rows, tensors in _tables(stepper, past):
            stored = content["tables"][name]
            _copy_rows(stored, tensors, slots, rows)
    progress.metrics_bytes = _bytes_up_to(run / "metrics.jsonl", progress.step)
    return progress, past


def _dense(stepper: Stepper) -> dict[str, Any]:
    """Return what every rank has whole: all but rows of tables."""
    counts = {
        group.title: {name: tensor for name, tensor in group.optimizer.state().items() if not tensor.dim()}
        for group in stepper.tables.groups
    }
    return {
        "model": {name: parameter.detach() for name, parameter in stepper.model.named_parameters()},
        "optimizer": stepper.dense_optimizer.state(),
        "task": stepper.task.state(),
        "counts": counts,
    }


def _tables(
    stepper: Stepper, past_weights: Sequence[Sequence[Tensor]]
) -> list[tuple[str, Tensor, Tensor, dict[str, Tensor]]]:
    """Return every table's name, which slots of this rank and rows of the table it is, and all tensors by slots."""
    found = []
    for number, group in enumerate(stepper.tables.groups):
        state = {name: tensor for name, tensor in group.optimizer.state().items() if tensor.dim()}
        past = {f"missing_{len(past_weights) - age}": version[number] for age, version in enumerate(past_weights)}
        for spec in group.specs:
            slots, rows = group.table.held_rows(*group.range_of(spec))
            found.append((spec.name, slots, rows, {"weight": group.table.weight, **state, **past}))
    return found


def _copy(stored: Any, own: Any) -> None:
    for name, value in own.items():
        if isinstance(value, dict):
            _copy(stored[name], value)
        else:
            value.copy_(stored[name])


def _copy_rows(stored: dict[str, Any], tensors: dict[str, Tensor], slots: Tensor, rows: Tensor) -> None:
    """Copy the rows that a part has into a rank's `tensors` at the `slots` [n] of its `rows` [n]."""
    there, order = stored["rows"].sort()
    if not there.numel():
        return
    places = torch.searchsorted(there, rows).clamp_(max=there.numel() - 1)
    has = there[places] == rows
    source, target = order[places[has]], slots[has]
    for name, tensor in tensors.items():
        tensor[target.to(tensor.device)] = stored["tensors"][name][source].to(tensor.device)


def _checksum(path: Path) -> str:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return f"{total:08x}"


def _is_sound(path: Path) -> bool:
    match = _PART.fullmatch(path.name)
    return match is not None and _checksum(path) == match[4]


def _bytes_up_to(path: Path, step: int) -> int:
    """Return how long the whole records of metrics.jsonl are that were written up to a step; rank 0 alone knew it."""
    length = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                later = json.loads(line)["step"] > step
            except (ValueError, KeyError, TypeError):
                break
            if later or not line.endswith(b"\n"):
                break
            length += len(line)
    return length
