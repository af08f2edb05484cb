"""Checks that ranks agree: the same code, config and data at the start, equal copies of the weights afterwards."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import turbogr
from turbogr import gemm_choice
from turbogr.errors import Note, UserError, warn_caller
from turbogr.ops import bf16_unit, native, projections, services
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World, first_difference

_VISIBLE_WITHIN_SECONDS = 20.0
_HASHED_AT_ONCE = 1 << 15  # elements, so that the temporary tensors fit into a core's cache


class ReplicaError(UserError):
    """Copies of the same weights differ."""


def check_same_start(world: World, facts: dict[str, Any]) -> None:
    """Compare `facts` (name to value) between the ranks; all ranks call it together.

    Raises:
        UserError: a rank differs from rank 0; the message names the rank and the fact.
    """
    everyone = world.gather_objects({**facts, "the code of turbogr": code_hash(), "torch": torch.__version__})
    found = first_difference(everyone)
    if found is not None:
        rank, name = found
        theirs, ours = (_short(everyone[r].get(name)) for r in (rank, 0))
        raise UserError(
            f"rank {rank} differs from rank 0 in {name}: {theirs}, not {ours}. Start every rank with the same turbogr, "
            "recipe, options and data, and with an --out that all machines share"
        )


def use_same_kernels(world: World, device: torch.device) -> None:
    """Make all ranks compute with the same kernels, so that equal numbers stay equal; all ranks call it together.

    Machines may have different processors. Kernels of different instruction sets round differently, so all ranks use
    the best set that every one of them can run, and a note says so.

    Raises:
        UserError: they have no instruction set in common, or an operator has different backends.
    """
    if world.size == 1:
        return
    everyone = world.gather_objects(world.run_on_all(lambda: _own_kernels(device)))
    found = first_difference([kernels.backends for kernels in everyone])
    if found is not None:
        rank, operator = found
        theirs, ours = (everyone[r].backends.get(operator) for r in (rank, 0))
        raise UserError(
            f"rank {rank} computes {operator} with the backend '{theirs}', and rank 0 with '{ours}', so their digits "
            "would differ; `turbogr doctor` on that machine says why. Fix it, or set train.backend=reference for all"
        )
    used = [kernels.isa for kernels in everyone]
    if len(set(used)) == 1:
        return
    names = [name for name in native.INSTRUCTION_SETS if name in used]  # best first
    weaker = native.INSTRUCTION_SETS[native.INSTRUCTION_SETS.index(names[-1]) :]
    common = [name for name in weaker if all(name in kernels.runnable for kernels in everyone)]
    listed = "; ".join(f"{name}: {_ranks(rank for rank, own in enumerate(used) if own == name)}" for name in names)
    if not common:
        raise UserError(
            f"the ranks have no instruction set of the kernels in common ({listed}), so their digits would differ; "
            "install the same build of turbogr on all machines, or set train.backend=reference"
        )
    native.set_isa(common[0])
    if world.is_first:
        warn_caller(
            f"the ranks have different instruction sets ({listed}); all use the kernels for {common[0]}, so that they "
            "compute the same digits",
            Note,
        )


def use_same_products(world: World, text: str) -> str:
    """Make all ranks compute large products by the same providers; all ranks call it together.

    `text` is what `projections.parse_choice` reads, or `auto`: what rank 0 has measured, of the providers that no rank
    refuses. Returns the choice as text.

    Raises:
        UserError: not a choice, or a rank cannot use a provider.
    """
    own = world.run_on_all(lambda: {name: gemm_choice.unusable(name) for name in projections.PROVIDERS})
    everyone = world.gather_objects(own)
    refused: dict[str, tuple[int, str]] = {}
    for rank, reasons in enumerate(everyone):
        for name, reason in reasons.items():
            if reason is not None:
                refused.setdefault(name, (rank, reason))
    found = [text]
    allowed = [name for name in projections.PROVIDERS if name not in refused]
    world.run_on_first(lambda: found.append(projections.write_choice(gemm_choice.resolve(text, allowed))))
    choice = projections.parse_choice(world.gather_objects(found[-1])[0])
    for name in sorted(set(choice.values())):
        if name in refused:
            rank, reason = refused[name]
            where = "" if world.size == 1 else f" of rank {rank}"
            raise UserError(
                f"train.gemm={text}: '{name}' cannot compute products on the machine{where}: {reason}. With "
                "--set train.gemm=torch the digits are others, and the run goes on from its checkpoint"
            )
    projections.use(choice)
    return projections.write_choice(choice)


def use_same_bf16_unit(world: World, kept: str | None = None) -> str:
    """Make all ranks multiply bf16 by the same unit and return it; all ranks call it together.

    It is `kept`, that of the run so far, if it works on every rank, else the best one that does. A note says where the
    digits will differ from those of the run so far.
    """
    own = world.run_on_all(lambda: (bf16_unit.in_use(), [u for u in bf16_unit.UNITS if bf16_unit.problem(u) is None]))
    everyone = world.gather_objects(own)
    usable = [unit for unit in bf16_unit.UNITS if all(unit in runnable for _, runnable in everyone)]
    if kept in usable:
        unit = kept
    else:
        weakest = max(bf16_unit.UNITS.index(used) for used, _ in everyone)
        unit = next(unit for unit in bf16_unit.UNITS[weakest:] if unit in usable)
        if kept is not None and world.is_first:
            warn_caller(
                f"the run so far multiplied bf16 by {kept}, which does not work here; from now on by {unit}, and "
                "digits are others",
                Note,
            )
    bf16_unit.use(unit)
    return unit


@dataclass(frozen=True)
class _Kernels:
    """What a rank computes with: backends by operator, the instruction set in use, and those that it could use."""

    backends: dict[str, str]
    isa: str | None
    runnable: list[str]


def _own_kernels(device: torch.device) -> _Kernels:
    backends = {service.operator: service.backend for service in services(device)}
    if native.BACKEND.name not in backends.values():
        return _Kernels(backends, None, [])
    return _Kernels(backends, native.isa(), native.available_isas())


def check_shared_folder(world: World, folder: Path) -> None:
    """Check that every rank sees a file that rank 0 writes into `folder`, and remove it; all ranks call it together.

    Raises:
        UserError: a rank has another folder at that path, so that its part of a checkpoint would be lost.
    """
    if world.size == 1:
        return
    probe = folder / f".seen-by-all-{world.gather_objects(secrets.token_hex(8))[0]}"
    world.run_on_first(probe.touch)
    try:
        world.run_on_all(lambda: _wait_for_file(probe))
    finally:
        if world.is_first:
            probe.unlink(missing_ok=True)


def _wait_for_file(path: Path) -> None:
    """Wait until a file is visible: a shared file system may show it late."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"{path.parent} on {socket.gethostname()} is not the folder that rank 0 writes to; give an --out on a "
                "file system that all machines share"
            )
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh its cache
        time.sleep(0.05)


@functools.cache
def code_hash() -> str:
    """Return a hash of the sources and kernels of the running package."""
    root = Path(turbogr.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".so")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def check_replicas(
    mesh: Mesh, dense: Mapping[str, Iterable[Tensor]], rows: Mapping[str, Iterable[Tensor]], step: int
) -> None:
    """Compare hashes of weights between ranks that hold copies of them; all ranks call it together.

    `dense` tensors must be equal on all ranks, table `rows` on the ranks that hold the same shard. The keys are the
    names in messages.


    Raises:
        ReplicaError: some differ; the message names the rank.
    """
    parts = {**dense, **rows}
    everyone = mesh.world.gather(torch.tensor([hash_bits(tensors) for tensors in parts.values()]))
    for rank, found in enumerate(everyone.tolist()):
        for column, name in enumerate(parts):
            replica = 0 if name in dense else rank % mesh.members
            if found[column] != int(everyone[replica, column]):
                raise ReplicaError(_replicas_differ(rank, replica, name, step))


def hash_bits(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit hash of the bits of tensors (32 or 64 bits per element) and of their positions."""
    total, position = 0, 0
    for tensor in tensors:
        size = _HASHED_AT_ONCE if tensor.device.type == "cpu" else 128 * _HASHED_AT_ONCE
        odd = torch.arange(1, 4 * size, 2, device=tensor.device)
        for piece in tensor.detach().reshape(-1).split(size):
            bits = piece.view(torch.int32).to(torch.int64)
            total += int((bits * odd[: bits.numel()]).sum()) + 2 * position * int(bits.sum())
            position += bits.numel()
    return (total + 2**63) % 2**64 - 2**63


def _replicas_differ(rank: int, other: int, what: str, step: int) -> str:
    return (
        f"the {what} of rank {rank} differ from those of rank {other} after step {step}: its memory or network is "
        "faulty, or its libraries differ. Check that machine, and continue from the last checkpoint with --resume"
    )


def _ranks(ranks: Iterable[int]) -> str:
    """Name some ranks, the first few of many."""
    listed = list(ranks)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:4]))}{more}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
