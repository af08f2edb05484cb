"""Triton kernels compiled for six devices and lowered for Ascend, on a machine that has none of them.

Claim: every kernel compiles for every device; the tables show registers, spills, shared memory and matrix instructions.
Compared with: the limits of each device.
Keys: `kernels` (variants: head size x precision x mask x bias), `targets`, `compiled` (variants on all devices),
`spills`, `over_shared_memory` and `without_matrix_units` (how many of these have one), `ascend_lowered`, and
`estimated_tflops_<kernel>_<target>`: an estimate, nobody has measured it.

The estimate is of one pass of the inner loop at head size 64 in bf16 with a mask and the slower bias, for the whole
device: time = max(products / peak, special functions / their rate, bytes / 4 / bandwidth), and products / time. It
leaves out everything else, so a measurement will be lower. `special` counts special functions per pair of a query and
a key. Occupancy is the share of a multiprocessor's warps that registers and shared memory leave room for. Results are
kept in ~/.cache/turbogr/kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from turbogr.bench._ascend import lower_for_ascend
from turbogr.bench._children import in_child
from turbogr.bench._compile_kernels import TARGETS, Target, compile_variants
from turbogr.bench._journal import measured
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError, did_you_mean
from turbogr.ops import triton_runtime
from turbogr.ops.triton_kernels.variants import Variant, kernel_names, list_variants

SETTINGS: dict[str, Any] = {
    "kernels": ["all"],
    "targets": list(TARGETS),
    "heads": [0, 16, 32, 64, 128],  # 0: kernels without heads
    "precisions": ["fp32", "tf32", "bf16"],
    "ascend": True,
}


def run(settings: Mapping[str, Any]) -> Result:
    """Compile everything that the settings name.

    Raises:
        UserError: Triton is not installed, or an unknown kernel or device.
    """
    if triton_runtime.BACKEND.problem is not None:
        raise UserError(triton_runtime.BACKEND.problem)
    kernels = _known("kernels", settings["kernels"], kernel_names())
    targets = [TARGETS[name] for name in _known("targets", settings["targets"], list(TARGETS))]
    by_device = {device: _select(settings, device, kernels) for device in {target.device for target in targets}}
    facts: list[dict[str, Any]] = []
    variants: list[Variant] = []
    for target in targets:
        chosen = by_device[target.device]
        facts += measured(target.name, partial(in_child, compile_variants, (target.name, chosen)))
        variants += chosen
    figures, notes = _figures(facts, variants, targets)
    if settings["ascend"]:
        lowered, problems = lower_for_ascend(_select(settings, "hip", kernels))
        figures["ascend_lowered"] = lowered
        notes += problems
    rows = [_row(fact, variant) for fact, variant in zip(facts, variants, strict=True)]
    columns = ["variant", "target", "registers", "spilled bytes", "shared KB", "matrix", "special", "occupancy %"]
    return Result(figures=figures, tables=[Table("kernels", columns, rows)], notes=notes)


def _known(setting: str, names: list[str], known: list[str]) -> list[str]:
    for name in names:
        if name not in (*known, "all"):
            raise UserError(
                f"{setting} names '{name}'; choose from all, {', '.join(known)}.{did_you_mean(name, known)}"
            )
    return known if "all" in names else names


def _select(settings: Mapping[str, Any], device: str, kernels: list[str]) -> list[Variant]:
    return [
        variant
        for variant in list_variants(device, kernels)
        if variant.head in settings["heads"] and variant.precision in ("", *settings["precisions"])
    ]


def _figures(
    facts: list[dict[str, Any]], variants: list[Variant], targets: list[Target]
) -> tuple[dict[str, Any], list[str]]:
    compiled = [fact for fact in facts if "error" not in fact]
    pairs = [(fact, variant) for fact, variant in zip(facts, variants, strict=True) if "error" not in fact]
    figures: dict[str, Any] = {
        "kernels": len({fact["variant"] for fact in facts}),
        "targets": len(targets),
        "compiled": len(compiled),
        "spills": sum(fact["spills"] > 0 for fact in compiled),
        "over_shared_memory": sum(fact["shared"] > TARGETS[fact["target"]].shared_limit for fact in compiled),
        "without_matrix_units": sum(variant.has_products and fact["matrix"] == 0 for fact, variant in pairs),
    }
    for fact, variant in pairs:
        if (variant.head, variant.precision, variant.mask) == (64, "bf16", "ranges") and variant.bias != "softmax":
            key = f"estimated_tflops_{variant.kernel}_{fact['target']}"
            figures[key] = min(figures.get(key, float("inf")), _estimate(fact, variant))
    notes = [f"{fact['variant']} on {fact['target']}: {fact['error']}" for fact in facts if "error" in fact]
    return figures, notes[:20]


def _estimate(fact: dict[str, Any], variant: Variant) -> float:
    target = TARGETS[fact["target"]]
    threads = variant.tile.num_warps * target.warp
    products = variant.flops / (1e12 * target.tflops[variant.precision])
    special = fact["special"] * threads / (target.special_per_clock * target.units * 1e9 * target.gigahertz)
    memory = variant.bytes / (1e9 * target.gigabytes_per_second) / 4  # tiles are read again from the second-level cache
    return float(round(variant.flops / max(products, special, memory) / 1e12, 1))


def _occupancy(fact: dict[str, Any], variant: Variant) -> int:
    target = TARGETS[fact["target"]]
    per_program = max(fact["registers"], 1) * variant.tile.num_warps * target.warp
    programs = min(target.registers // per_program, target.shared_limit // max(fact["shared"], 1))
    percent: int = round(100 * min(1.0, programs * variant.tile.num_warps / target.max_warps))
    return percent


def _row(fact: dict[str, Any], variant: Variant) -> list[Cell]:
    if "error" in fact:
        return [fact["variant"], fact["target"], None, None, None, None, None, None]
    threads = variant.tile.num_warps * TARGETS[fact["target"]].warp
    special = round(fact["special"] * threads / variant.pairs, 2) if variant.pairs else None
    shared = round(fact["shared"] / 1024, 1)
    numbers = (fact["registers"], fact["spills"], shared, fact["matrix"], special)
    return [fact["variant"], fact["target"], *numbers, _occupancy(fact, variant)]
