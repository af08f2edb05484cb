"""What this machine is, which backends TurboGR uses on it, and what is worth fixing.

`examine` collects plain facts and never fails because of the machine: whatever may crash or hang is tried in a child
process, and a fact that cannot be found is replaced by the reason.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch

from turbogr import gemm_choice, machine, ops, peak
from turbogr.errors import UserError
from turbogr.ops import bf16_unit, native

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
FMA_PRECISIONS = (torch.float32, torch.bfloat16)

_GB = 1e9
_LITTLE_DISK = 5 * _GB
_LITTLE_MEMORY = 2 * _GB
_EMULATED = 0.2


def examine(folder: Path | str = ".", measure: bool = True) -> dict[str, Any]:
    """Return the facts as plain JSON values; `folder` is where free disk space is looked up.

    Keys: versions, machine, devices, compiler, kernels, backends, operators, fma_peak, gemm_peak, products, bf16,
    memory, disk, warnings. `fma_peak` and `gemm_peak` (what the processor computes at most, and in a matrix product)
    map a precision to {"flops": rate} or {"fault": reason}; without `measure` they are empty. `products` is who
    computes the large products of a projection: `rates` in GFLOP/s and `refused` with reasons by provider, and the
    `choice`; without `measure` what was measured before, or None. `bf16` maps the units for bf16 to why they cannot be
    used here, or None.
    """
    facts: dict[str, Any] = {
        "versions": machine.versions(),
        "machine": machine.machine_facts(),
        "devices": devices(),
        "compiler": compiler(),
        "kernels": kernels(),
        "backends": [_backend(backend) for backend in ops.backends()],
        "operators": [
            {"operator": service.operator, "backend": service.backend, "why": service.why}
            for service in ops.services(torch.device("cpu"))
        ],
        "fma_peak": {_short(dtype): _fma_peak(dtype) for dtype in FMA_PRECISIONS} if measure else {},
        "gemm_peak": {_short(dtype): _peak(dtype) for dtype in PRECISIONS} if measure else {},
        "products": _products(measure),
        "bf16": {unit: _unit_problem(unit) for unit in bf16_unit.UNITS if unit != "none"},
        "memory": {"total_bytes": machine.memory_bytes(), "available_bytes": available_memory()},
        "disk": _disk(Path(folder)),
    }
    facts["warnings"] = find_problems(facts)
    return facts


def _unit_problem(unit: str) -> str | None:
    try:
        return bf16_unit.problem(unit)
    except UserError as error:
        return str(error)


def _bf16_row(units: dict[str, str | None]) -> str:
    """Which unit multiplies bf16 with train.precision=bf16, or why none does."""
    works = next((unit for unit, problem in units.items() if problem is None), None)
    if works is not None:
        return f"products by {works}"
    return "no unit, products run in fp32 (" + "; ".join(f"{unit}: {problem}" for unit, problem in units.items()) + ")"


def _backend(backend: ops.Backend) -> dict[str, str | None]:
    devices, dtypes = ", ".join(backend.devices), ", ".join(map(_short, backend.dtypes))
    serves = f"on {devices or 'every device'} in {dtypes or 'every floating type'}"
    return {"backend": backend.name, "serves": serves, "problem": backend.problem}


def devices() -> list[str]:
    """Return a name for every device that torch can use here, the CPU last."""
    found = []
    for kind in ("cuda", "npu", "xpu", "mps"):
        module = getattr(torch, kind, None)
        try:
            if module is None or not module.is_available():
                continue
            names = [module.get_device_name(index) for index in range(module.device_count())] if kind != "mps" else [""]
        except (AssertionError, AttributeError, RuntimeError) as error:  # a driver that is installed but broken
            names = [f"cannot be used: {error}"]
        found += [f"{kind}:{index} {name}".rstrip() for index, name in enumerate(names)]
    return [*found, "cpu"]


def compiler() -> str | None:
    """Return the path of the C++ compiler that a build would use, or None."""
    wanted = shlex.split(os.environ.get("CXX", ""))[:1]
    return next((path for name in wanted or ["c++", "g++", "clang++"] if (path := shutil.which(name))), None)


def kernels() -> str | None:
    """Return the instruction set of the compiled kernels that run here, or None if they were not built."""
    try:
        return native.isa()
    except UserError:
        return None


def available_memory() -> int | None:
    """Return the bytes that programs can still allocate without swapping, or None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min(kilobytes[0] * 1024, machine.memory_bytes()) if kilobytes else None


def find_problems(facts: dict[str, Any]) -> list[str]:
    """Return a sentence with its remedy for everything in the facts that is worth fixing."""
    problems = []
    threads, cores = facts["machine"]["threads"], facts["machine"]["cores"]
    if threads > cores:
        problems.append(
            f"torch uses {threads} threads on {cores} usable cores, which slows every operator down; "
            f"set OMP_NUM_THREADS={cores} or train.threads"
        )
    slow = [row["operator"] for row in facts["operators"] if row["backend"] == "reference"]
    if slow and len(slow) == len(facts["operators"]):
        problems.append(_kernels_missing(facts))
    faults = {name: peak["fault"] for name, peak in facts["gemm_peak"].items() if "fault" in peak}
    problems += [f"{fault}; do not compute in {name} on this machine" for name, fault in faults.items()]
    problems += _emulated(facts["gemm_peak"])
    free = facts["disk"]["free_bytes"]
    if free < _LITTLE_DISK:
        problems.append(
            f"only {free / _GB:.1f} GB are free under {facts['disk']['path']}; "
            "free some space before preparing data or training there"
        )
    available = facts["memory"]["available_bytes"]
    if available is not None and available < _LITTLE_MEMORY:
        problems.append(f"only {available / _GB:.1f} GB of memory are available; end other programs before training")
    return problems


def _emulated(peaks: dict[str, dict[str, Any]]) -> list[str]:
    """Return a warning for every precision so much slower than float32 that the machine must be emulating it."""
    full = peaks.get("float32", {}).get("flops")
    if full is None:
        return []
    shares = {name: peak["flops"] / full for name, peak in peaks.items() if "flops" in peak}
    return [
        f"{name} is emulated here and runs at {share:.1%} of the speed of float32; train in float32"
        for name, share in shares.items()
        if share < _EMULATED
    ]


def summarise(facts: dict[str, Any]) -> str:
    """Return what matters of the facts in ten lines, and a line for each thing that is worth fixing."""
    versions, rows = facts["versions"], dict(_machine_rows(facts))
    shown = [
        ("versions", f"turbogr {versions['turbogr']}, Python {versions['python']}, torch {versions['torch']}"),
        ("machine", f"{rows['cpu']}, {rows['system']}"),
        *((name, rows[name]) for name in ("cores", "devices", "memory", "disk", "kernels")),
        ("operators", _operators_row(facts["operators"])),
    ]
    if facts["gemm_peak"]:
        shown.append(("speed", ", ".join(f"{name} {speed}" for name, speed in _speed_rows(facts))))
    width = max(len(name) for name, _ in shown)
    lines = [f"{name:<{width}}  {value}" for name, value in shown]
    problems = [f"worth fixing: {warning}" for warning in facts["warnings"]]
    return "\n".join([*lines, *(problems or ["Nothing to fix."])])


def _operators_row(operators: list[dict[str, Any]]) -> str:
    """Count the operators by backend; those on the reference, which is slow, are named if they are few."""
    by_backend: dict[str, list[str]] = {}
    for row in operators:
        by_backend.setdefault(row["backend"], []).append(row["operator"])
    counts = []
    for backend, names in by_backend.items():
        few = backend == "reference" and len(names) < len(operators)
        counts.append(f"{len(names)} of {len(operators)} on {backend}" + (f" ({', '.join(names)})" if few else ""))
    return ", ".join(counts)


def describe(facts: dict[str, Any]) -> str:
    """Return all facts as readable text."""
    sections = [
        _table("Versions", facts["versions"].items()),
        _table("Machine", _machine_rows(facts)),
        _table("Backends", [(row["backend"], row["problem"] or f"runs {row['serves']}") for row in facts["backends"]]),
        _table("Operators", [(row["operator"], f"{row['backend']:<10} {row['why']}") for row in facts["operators"]]),
    ]
    if facts["gemm_peak"]:
        sections.append(_table("Speed: fused multiply-adds (the 100 % of MFU), matrix product", _speed_rows(facts)))
    if facts["products"]:
        title = "Large products of a projection: who computes them with train.gemm=auto (GFLOP/s)"
        sections.append(_table(title, _product_rows(facts["products"])))
    if facts["warnings"]:
        sections.append("Worth fixing\n" + "\n".join(f"  - {warning}" for warning in facts["warnings"]))
    else:
        sections.append("Nothing to fix.")
    return "\n\n".join(sections)


def _kernels_missing(facts: dict[str, Any]) -> str:
    reason = "every operator runs on the slower reference backend"
    if facts["compiler"] is None:
        return f"{reason} and there is no C++ compiler; install one (g++ or clang++) and run pip install again"
    why = facts["operators"][0]["why"]
    return f"{reason} ({why}); build the kernels with {facts['compiler']}: run pip install again, or make setup"


def _peak(dtype: torch.dtype) -> dict[str, Any]:
    try:
        return {"flops": machine.gemm_peak(dtype, timeout=60.0)}
    except machine.GemmUnavailable as error:
        return {"fault": str(error)}


def _fma_peak(dtype: torch.dtype) -> dict[str, Any]:
    try:
        return {"flops": peak.fma_peak(dtype)}
    except peak.PeakUnavailable as error:
        return {"fault": str(error)}


def _products(measure: bool) -> dict[str, Any] | None:
    found = gemm_choice.measured() if measure else gemm_choice.kept()
    if found is None:
        return None
    choice = {f"{size} {product}": provider for (size, product), provider in found.choice().items()}
    return {"rates": found.rates, "refused": found.refused, "choice": choice}


def _product_rows(products: dict[str, Any]) -> list[tuple[str, str]]:
    """By size of the weight and product: who computes it, how fast each provider is, and why one is refused."""
    rows = []
    for key, provider in products["choice"].items():
        rates = [f"{name} {rate:,.1f}" for name, rate in products["rates"][key].items()]
        refused = [f"{name} refused: {reason}" for name, reason in products["refused"][key].items()]
        rows.append((key.replace("_", " "), f"{provider:<8} ({', '.join([*rates, *refused])})"))
    return rows


def _speed_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """By precision, what the processor computes at most, and in a matrix product."""
    rows = []
    for name, gemm in facts["gemm_peak"].items():
        most = facts["fma_peak"].get(name, {}).get("flops")
        product = gemm["fault"] if "fault" in gemm else f"{gemm['flops'] / 1e9:,.1f} GFLOP/s"
        rows.append((name, product if most is None else f"at most {most / 1e9:,.1f}, matrix product {product}"))
    return rows


def _disk(folder: Path) -> dict[str, Any]:
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return {"path": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}


def _machine_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    here, memory, disk = facts["machine"], facts["memory"], facts["disk"]
    available = memory["available_bytes"]
    free = "" if available is None else f"{available / _GB:.1f} GB available of "
    return [
        ("system", here["system"]),
        ("cpu", here["cpu"]),
        ("cores", f"{here['cores']} usable, torch uses {here['threads']} threads"),
        ("instructions", " ".join(here["isa"]) or "none known"),
        ("devices", ", ".join(facts["devices"])),
        ("memory", f"{free}{memory['total_bytes'] / _GB:.1f} GB"),
        ("disk", f"{disk['free_bytes'] / _GB:.1f} GB free of {disk['total_bytes'] / _GB:.1f} GB under {disk['path']}"),
        ("kernels", f"built, running those for {facts['kernels']}" if facts["kernels"] else "not built"),
        ("bf16", _bf16_row(facts["bf16"])),
        ("compiler", facts["compiler"] or "none found; the reference operators are used"),
    ]


def _table(title: str, rows: Any) -> str:
    rows = [(str(name), str(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
