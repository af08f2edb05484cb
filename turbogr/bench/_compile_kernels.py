"""Compile Triton kernels for a device that is not there, and read what the compiler says about them.

Results are kept in ~/.cache/turbogr/kernels, by the kernels' sources and Triton's version: a second run is quick.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from turbogr.files import replace_text
from turbogr.ops import triton_kernels
from turbogr.ops.triton_kernels.variants import Variant

_RESULT_VERSION = 2


@dataclass(frozen=True)
class Target:
    """A device: its names for Triton, limits of a program, and figures of its data sheet for estimates.

    `tflops` are peaks of dense products by precision, `gigabytes_per_second` the memory's, `special_per_clock`
    operations such as exp per clock of one of the `units` (multiprocessors or compute units), `registers` of a unit.
    """

    name: str
    device: str
    arch: int | str
    warp: int
    shared_limit: int
    tflops: dict[str, float]
    gigabytes_per_second: float
    units: int
    gigahertz: float
    special_per_clock: int
    registers: int = 65536
    max_warps: int = 64


TARGETS = {
    target.name: target
    for target in (
        Target("sm80", "cuda", 80, 32, 163 << 10, {"bf16": 312, "tf32": 156, "fp32": 52}, 2039, 108, 1.41, 16),
        Target("sm90", "cuda", 90, 32, 227 << 10, {"bf16": 989, "tf32": 495, "fp32": 165}, 3350, 132, 1.83, 16),
        Target("sm100", "cuda", 100, 32, 227 << 10, {"bf16": 2250, "tf32": 1125, "fp32": 375}, 8000, 148, 1.96, 16),
        Target(
            "sm120", "cuda", 120, 32, 99 << 10, {"bf16": 210, "tf32": 105, "fp32": 35}, 1792, 170, 2.41, 16,
            max_warps=48,
        ),
        Target(
            "gfx942", "hip", "gfx942", 64, 64 << 10, {"bf16": 1307, "tf32": 654, "fp32": 163}, 5300, 304, 2.1, 16,
            registers=131072, max_warps=32,
        ),
        Target(
            "gfx950", "hip", "gfx950", 64, 160 << 10, {"bf16": 2300, "tf32": 157, "fp32": 157}, 8000, 256, 2.4, 16,
            registers=131072, max_warps=32,
        ),
    )
}  # fmt: skip
"""The devices: A100, H100, B200, RTX 5090, MI300X and MI355X. fp32 on NVIDIA is a third of TF32: three products."""


def cache_folder() -> Path:
    """Where results are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turbogr" / "kernels"


def sources_hash() -> str:
    """Changes with the sources of the kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(triton_kernels.__file__).parent.glob("*.py")):
        source = path.read_bytes()
        if b"@triton.jit" in source:  # a variant itself is part of what names a result
            digest.update(source)
    return digest.hexdigest()[:16]


def compile_variants(job: tuple[str, list[Variant]]) -> list[dict[str, Any]]:
    """Facts about every variant compiled for one target, in a process without the interpreter; see `_facts`."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    name, variants = job
    return [_kept(variant, TARGETS[name]) for variant in variants]


def _kept(variant: Variant, target: Target) -> dict[str, Any]:
    import triton

    key = f"{_RESULT_VERSION} {triton.__version__} {sources_hash()} {target.name} {variant}"
    path = cache_folder() / f"{variant.name}-{target.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = _compile(variant, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(found))
    return found


def signature_of(
    variant: Variant, arguments: list[str]
) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[Any]]]]:
    """Types of the arguments, and which are known to be divisible by 16: pointers and strides."""
    signature = {name: "constexpr" if name in variant.constants else variant.argument_type(name) for name in arguments}
    divisible = [
        (at,)
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith(("_token", "_head"))
    ]
    return signature, {at: [["tt.divisibility", 16]] for at in divisible}


def _compile(variant: Variant, target: Target) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"turbogr.ops.triton_kernels.{variant.module}"), variant.function)
    signature, attributes = signature_of(variant, kernel.arg_names)
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    try:
        with tempfile.TemporaryDirectory() as folder, triton.knobs.nvidia.scope(), redirect_stdout(StringIO()) as log:
            triton.knobs.nvidia.dump_ptxas_log = True
            os.environ["TRITON_CACHE_DIR"] = folder  # the facts are kept, not the binaries
            compiled = triton.compile(
                source, target=GPUTarget(target.device, target.arch, target.warp), options=variant.tile.options()
            )
            return _facts(compiled, variant, target, log.getvalue())
    except Exception as error:  # whatever the compiler raises is its verdict on this variant
        return {"variant": variant.name, "target": target.name, "error": f"{type(error).__name__}: {error}"[-500:]}


def _facts(compiled: Any, variant: Variant, target: Target, log: str) -> dict[str, Any]:
    """Registers of a thread, bytes spilled, shared memory, and instructions by kind; `log` is what ptxas printed."""
    text = compiled.asm["ptx" if target.device == "cuda" else "amdgcn"]
    facts: dict[str, Any] = {"variant": variant.name, "target": target.name, "shared": int(compiled.metadata.shared)}
    if target.device == "cuda":
        facts["registers"], facts["spills"] = _registers(log)
        patterns = {
            "matrix": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)",
            "special": r"\b(?:ex2|lg2|rcp|tanh)\.approx|div\.full",
        }
    else:
        facts["registers"] = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        facts["spills"] = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
        patterns = {"matrix": r"\bv_s?mfma", "special": r"\bv_(?:exp|log|rcp)_f32"}
    bodies = _loop_bodies(text, target.device)
    facts["matrix"] = len(re.findall(patterns["matrix"], text))
    facts["special"] = max((len(re.findall(patterns["special"], body)) for body in bodies), default=0)
    return facts


def _registers(log: str) -> tuple[int, int]:
    """Registers and bytes of spill stores, as `ptxas -v` reports them with the options of a launch."""
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log)]
    return int(re.findall(r"Used (\d+) registers", log)[0]), max(spills, default=0)


def _loop_bodies(text: str, device: str) -> list[str]:
    """The text between a label and a jump back to it, for every loop."""
    label = r"^(\$?L__BB\d+_\d+|\.LBB\d+_\d+):"
    places = {match.group(1): match.end() for match in re.finditer(label, text, re.MULTILINE)}
    jump = r"\bbra(?:\.uni)?\s+(\$?L__BB\d+_\d+)" if device == "cuda" else r"\bs_c?branch\w*\s+(\.LBB\d+_\d+)"
    return [
        text[places[match.group(1)] : match.start()]
        for match in re.finditer(jump, text)
        if places.get(match.group(1), len(text)) < match.start()
    ]
