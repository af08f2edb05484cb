"""Lower Triton kernels for Ascend with the compiler of triton-ascend, in an environment of its own.

triton-ascend replaces the package triton, so it gets a virtual environment in ~/.cache/turbogr, made once. There a
small program makes Triton's intermediate code and gives it to `triton-adapter-opt`, as the wheel's own compiler does.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from turbogr.bench._compile_kernels import cache_folder, signature_of, sources_hash
from turbogr.files import replace_text
from turbogr.ops import triton_kernels
from turbogr.ops.triton_kernels.variants import Variant

PACKAGES = ("triton-ascend==3.2.0", "pybind11", "numpy")
_RESULT_VERSION = 1

_PROGRAM = """
import json, subprocess, sys, tempfile, types, importlib
from pathlib import Path
for name in ("turbogr", "turbogr.ops"):  # without the package itself, which needs torch
    sys.modules[name] = types.ModuleType(name)
kernels = types.ModuleType("turbogr.ops.triton_kernels")
kernels.__path__ = [sys.argv[1]]
sys.modules["turbogr.ops.triton_kernels"] = kernels
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend
from triton.backends.ascend.utils import _get_triton_adapter_opt_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def lower(job):
    kernel = getattr(importlib.import_module("turbogr.ops.triton_kernels." + job["module"]), job["function"])
    signature = {name: kind for name, kind in job["signature"].items() if kind != "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constants=job["constants"])
    backend = AscendBackend(GPUTarget("npu", "Ascend910B", 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages = {}
    backend.add_stages(stages, options)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    module = stages["ttir"](module, {"hash": "0"})
    with tempfile.TemporaryDirectory() as folder:
        made, out = Path(folder, "kernel.ttir.mlir"), Path(folder, "kernel.mlir")
        made.write_text(str(module))
        simd = "compile-on-910-95=False force-simt-template=False"
        command = [_get_triton_adapter_opt_path(), str(made), f"--discrete-mask-access-conversion={simd}",
            "--triton-to-annotation", f"--triton-to-unstructure={simd}", "--triton-to-hivm", "--triton-to-hfusion",
            "--triton-to-llvm", "--bubble-up-operation",
            "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False "
            "enable-select-analysis=True compile-on-910-95=False", "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-400:])
        return out.read_text().count("linalg.matmul")

for line in sys.stdin:
    job = json.loads(line)
    try:
        print(json.dumps({"matmuls": lower(job)}), flush=True)
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[-400:]}), flush=True)
"""


def lower_for_ascend(variants: list[Variant]) -> tuple[int | None, list[str]]:
    """How many variants could be lowered, None without the environment, and notes on those that could not."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = _environment(folder / "ascend")
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        return None, [f"nothing was lowered for Ascend: {' '.join(PACKAGES)} could not be installed ({reason})"]
    lowered, notes = 0, []
    process = None
    for variant in variants:
        key = f"{_RESULT_VERSION} {PACKAGES} {sources_hash()} {_PROGRAM} {variant}"
        path = folder / f"{variant.name}-ascend-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
        else:
            process = process or _start(python)
            result = _ask(process, variant)
            replace_text(path, json.dumps(result))
        if "error" in result:
            notes.append(f"{variant.name} on Ascend: {result['error']}")
        else:
            lowered += 1
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return lowered, notes[:10]


def _environment(folder: Path) -> Path:
    """The Python of the environment, which is made if it is not there; an interrupted installation is repeated."""
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists() and done.read_text(encoding="utf-8") == " ".join(PACKAGES):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    run = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], **run)  # type: ignore[call-overload]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, *PACKAGES], **run)  # type: ignore[call-overload]
    replace_text(done, " ".join(PACKAGES))
    return python


def _start(python: Path) -> subprocess.Popen[str]:
    kernels = str(Path(triton_kernels.__file__).parent)
    command = [str(python), "-c", _PROGRAM, kernels]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _ask(process: subprocess.Popen[str], variant: Variant) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    signature, _ = signature_of(variant, _arguments(variant))
    job = {
        "module": variant.module,
        "function": variant.function,
        "signature": signature,
        "constants": {**variant.constants, "PRECISION": "ieee"}
        if "PRECISION" in variant.constants
        else variant.constants,
    }
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    found: dict[str, Any] = json.loads(answer) if answer else {"error": "the compiler ended"}
    return found


def _arguments(variant: Variant) -> list[str]:
    from importlib import import_module

    kernel = getattr(import_module(f"turbogr.ops.triton_kernels.{variant.module}"), variant.function)
    names: list[str] = kernel.arg_names
    return names
