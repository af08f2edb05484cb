"""What `turbogr doctor --accelerator` finds out on a device that we do not have, within two minutes.

Our kernels are proved without hardware as far as that goes (docs/guide/accelerators.md). This is the rest: each section
is independent, its failure is a part of the result, and the result is plain JSON that can be sent to us. It holds no
data and no path, only versions, names of devices, errors, times and sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turbogr import machine, ops
from turbogr.accelerator_ranks import exchange_between_two
from turbogr.config import Config, LossConfig, ModelConfig, resolve
from turbogr.device_measurement import (
    PRECISIONS,
    device_gemm_peak,
    device_seconds,
    peak_memory,
    reset_peak_memory,
    synchronize,
)
from turbogr.models.golden import TOLERANCE, Golden, relative_error
from turbogr.operator_cases import Case, all_cases
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.cost_measurement import made_up_batch
from turbogr.training.step import Stepper

DEFAULT_FILE = "turbogr-accelerator.json"

_FACTOR, _ROUNDING = 2.0, 1e-6
_PUBLISHED = {512: 176e12, 2048: 398e12, 8192: 485e12}
_PUBLISHED_BY = "NVIDIA's CUTLASS HSTU attention on H100, 16 sequences, 8 heads of 128, bf16, forward and backward"
_OUT_OF_TIME = "left out: the time was over"

Section = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """How large what is measured is."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    num_sequences: int = 16
    heads: int = 8
    width: int = 128
    block_length: int = 1024
    block_sequences: int = 8


def check_accelerator(
    device: torch.device,
    goldens: Sequence[Path] = (),
    *,
    sizes: Sizes | None = None,
    max_seconds: float = 120.0,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Return what was found, by section; `say` is called with the name of each before it starts.

    A section that fails is {"fault": reason}; those that come after `max_seconds` are left out and say so. `failed`
    lists what is wrong: sections that failed, operators beyond their bound, golden files that differ, a step that is
    not reproducible.
    """
    sizes = sizes or Sizes()
    sections: dict[str, Section] = {
        "device": lambda: device_facts(device),
        "operators": lambda: compare_operators(device),
        "golden": lambda: {str(path.name): _golden(path, device) for path in goldens},
        "same_step_twice": lambda: same_step_twice(device),
        "gemm_flops": lambda: {name: device_gemm_peak(device, name) for name in PRECISIONS},
        "block": lambda: block_memory(device, sizes),
        "attention": lambda: attention_rates(device, sizes),
        "ranks": lambda: exchange_between_two(device),
    }
    started = time.perf_counter()
    found: dict[str, Any] = {"versions": machine.versions(), "machine": machine.machine_facts()}
    for name, work in sections.items():
        if time.perf_counter() - started > max_seconds:
            found[name] = {"fault": _OUT_OF_TIME}
            continue
        say(name)
        try:
            found[name] = work()
        except Exception as error:  # whatever a driver does is a part of the result
            found[name] = {"fault": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    found["seconds"] = time.perf_counter() - started
    found["failed"] = _failures(found, list(sections))
    return found


def _failures(found: dict[str, Any], sections: Sequence[str]) -> list[str]:
    failed = [f"{name}: {found[name]['fault']}" for name in sections if "fault" in found[name]]
    if "fault" not in found["operators"]:
        for name, row in found["operators"].items():
            for precision in ("fp32", "bf16"):
                result = row.get(precision, {})
                if "fault" in result:
                    failed.append(f"{name} in {precision}: {result['fault']}")
                elif result and not result["fine"]:
                    failed.append(
                        f"{name} in {precision}: error {result['error']:.1e}, allowed is {result['allowed']:.1e}"
                    )
    if "fault" not in found["golden"]:
        for name, error in found["golden"].items():
            if not error <= TOLERANCE:
                failed.append(f"golden file {name}: error {error:.1e}, allowed is {TOLERANCE:g}")
    if found["same_step_twice"].get("equal") is False:
        failed.append("the same step computed twice gives different weights")
    return failed


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the name, memory and number of devices, and which backend serves each operator and why."""
    module = getattr(torch, device.type, None)
    name = getattr(module, "get_device_name", lambda index: device.type)(device.index or 0)
    capability = getattr(module, "get_device_capability", lambda index: None)(device.index or 0)
    return {
        "type": device.type,
        "name": str(name),
        "capability": None if capability is None else str(capability),
        "count": torch.accelerator.device_count() if device.type not in ("cpu", "meta") else 1,
        "memory_bytes": machine.device_memory(device),
        "backends": {row.operator: {"backend": row.backend, "why": row.why} for row in ops.services(device)},
    }


def compare_operators(device: torch.device) -> dict[str, Any]:
    """Compare every operator on the device, in fp32 and bf16, with its definition in float64 on the CPU.

    An error is the largest relative error among the outputs and gradients. Allowed is twice that of plain PyTorch on
    the CPU in the same precision. Integers must be equal.
    """
    return {case.operator: _compare(case, device) for case in all_cases()}


def _compare(case: Case, device: torch.device) -> dict[str, Any]:
    cpu = torch.device("cpu")
    with ops.backend("reference"):
        exact = case.run(cpu, torch.float64)
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16} if case.has_gradients else {"fp32": torch.float32}
    rows: dict[str, Any] = {}
    for name, dtype in precisions.items():
        with ops.backend("reference"):
            plain = _largest_error(case.run(cpu, dtype), exact)
        try:
            error = _largest_error(case.run(device, dtype), exact)
        except Exception as fault:
            rows[name] = {"fault": f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"}
            continue
        allowed = _FACTOR * plain + _ROUNDING if case.floats else 0.0
        rows[name] = {"error": error, "allowed": allowed, "fine": error <= allowed}
    return rows


def _largest_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return max(relative_error(ours, theirs) for ours, theirs in zip(found, exact, strict=True))


def _golden(path: Path, device: torch.device) -> float:
    return max(row.error for row in Golden.read(path).compare(device=device))


def same_step_twice(device: torch.device) -> dict[str, Any]:
    """Train two steps twice, with dropout and negatives, and compare all weights bit for bit."""
    first, second = (_two_steps(device) for _ in range(2))
    return {"equal": all(torch.equal(one, two) for one, two in zip(first, second, strict=True))}


def _two_steps(device: torch.device) -> list[torch.Tensor]:
    config = Config(
        model=ModelConfig(name="hstu", dim=64, num_blocks=2, num_heads=2, max_len=128, dropout=0.2),
        loss=LossConfig(num_negatives=64),
    )
    sizes: dict[str, Any] = {"num_sequences": 1024, "typical_length": 64, "longest_length": 128}
    stepper = Stepper(resolve(config, num_items=500, **sizes), 500, device=device, mesh=Mesh(World()))
    for step in range(2):
        batch = stepper.prepare(made_up_batch(np.array([1, 30, 128, 77, 64]), 500), step)
        sets = stepper.fetch(batch)
        loss = stepper.compute(batch, sets, step)
        rows = stepper.reduce(sets)
        stepper.update(rows, stepper.measure(loss, rows).grad_norm, 1.0)
    return [tensor.detach().cpu() for tensor in (*stepper.model.parameters(), *stepper.tables.weights)]


def block_memory(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return the peak memory and the time of one HSTU block, forward and backward."""
    heads, dim = sizes.heads, sizes.heads * sizes.width // 2
    config = Config(
        model=ModelConfig(name="hstu", dim=dim, num_blocks=1, num_heads=heads, max_len=sizes.block_length, dropout=0.2),
        loss=LossConfig(num_negatives=16),
    )
    facts: dict[str, Any] = {"num_sequences": 1024, "typical_length": sizes.block_length}
    config = resolve(config, num_items=1000, longest_length=sizes.block_length, **facts)
    stepper = Stepper(config, 1000, device=device, mesh=Mesh(World()))
    made_up = made_up_batch(np.full(sizes.block_sequences, sizes.block_length), 1000)
    batch = stepper.prepare(made_up, 0)
    reset_peak_memory(device)

    def both_passes() -> None:
        stepper.compute(batch, stepper.fetch(batch), 0)

    seconds = device_seconds(both_passes, device, repeats=3)
    tokens = batch.num_tokens
    peak = peak_memory(device)
    return {
        "tokens": tokens,
        "dim": dim,
        "heads": heads,
        "seconds": seconds,
        "peak_bytes": peak,
        "bytes_per_token": None if peak is None else peak / tokens,
    }


def attention_rates(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return the time and rate of `hstu_attention` with its relative bias, forward and backward, beside published ones.

    FLOPs are those of seven matrix products of the causal half: 7 · 2 · (n² / 2) · heads · width per sequence. The
    definition in plain PyTorch keeps all pairs, so it is measured on one sequence of up to 2,048.
    """
    plain = any(row.operator == "hstu_attention" and row.backend == "reference" for row in ops.services(device))
    rows = []
    for length in sizes.lengths:
        row: dict[str, Any] = {"length": length, "published_flops": _PUBLISHED.get(length)}
        if plain and length > 2048:
            rows.append({**row, "fault": "only the definition in plain PyTorch serves this device"})
            continue
        count = 1 if plain else sizes.num_sequences
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            try:
                seconds = _attention_seconds(device, dtype, count, length, sizes)
            except Exception as error:
                row[name] = {"fault": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
                continue
            flops = 7 * length * length * sizes.heads * sizes.width * count
            row[name] = {"seconds": seconds, "flops": flops / seconds}
        rows.append({**row, "num_sequences": count})
    return {"heads": sizes.heads, "width": sizes.width, "published_by": _PUBLISHED_BY, "shapes": rows}


def _attention_seconds(device: torch.device, dtype: torch.dtype, count: int, length: int, sizes: Sizes) -> float:
    shape = count * length, sizes.heads, sizes.width
    q, k, v, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = torch.arange(count + 1, dtype=torch.int64).mul_(length).to(device)
    times = (torch.arange(count * length, dtype=torch.int64) * 60).to(device)
    weights = (torch.zeros(number, dtype=dtype, device=device) for number in (2 * length - 1, 129))
    bias = ops.RelativeBias(times, times, *weights)

    def both_passes() -> None:
        out = ops.hstu_attention(q, k, v, offsets, bias, max_len=length)
        torch.autograd.grad(out, leaves, grad)

    seconds = device_seconds(both_passes, device, repeats=3)
    synchronize(device)
    return seconds


def summarise(found: dict[str, Any]) -> str:
    """Return what matters of the result, a line for each section and for everything that is wrong."""
    device = found["device"]
    lines = [f"device      {device.get('name', device.get('fault'))}, torch {found['versions']['torch']}"]
    if "fault" not in found["operators"]:
        served: dict[str, int] = {}
        for row in device.get("backends", {}).values():
            served[row["backend"]] = served.get(row["backend"], 0) + 1
        counts = ", ".join(f"{number} on {backend}" for backend, number in served.items())
        lines.append(f"operators   {len(found['operators'])} compared with float64 on the CPU; {counts}")
    if "fault" not in found["gemm_flops"]:
        rates = ", ".join(f"{name} {rate / 1e12:,.2f}" for name, rate in found["gemm_flops"].items())
        lines.append(f"products    {rates} TFLOP/s, the best of the device's library")
    for row in found["attention"].get("shapes", []):
        known = [(name, row[name]["flops"]) for name in ("fp32", "bf16") if "flops" in row.get(name, {})]
        rates = ", ".join(f"{name} {flops / 1e12:,.2f}" for name, flops in known)
        if rates:
            lines.append(f"attention   {row['num_sequences']} × {row['length']:,}: {rates} TFLOP/s")
    if found["block"].get("bytes_per_token"):
        lines.append(f"memory      {found['block']['bytes_per_token']:,.0f} bytes a token and block")
    lines.append(f"ranks       {found['ranks'].get('what') or found['ranks'].get('fault')}")
    lines += [f"wrong: {failure}" for failure in found["failed"]] or ["Nothing is wrong."]
    return "\n".join(lines)
