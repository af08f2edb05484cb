"""Build of the C++ kernels: one shared library with a plain C interface, loaded with ctypes at run time.

The library needs neither PyTorch's nor Python's headers, so one build serves every version of both. Each kernel source
is compiled once per instruction set (see csrc/runtime.h). Without a compiler the package installs all the same and
runs on the reference operators.

Environment: CXX names the compiler; TURBOGR_SANITIZE=address,undefined builds for the sanitizers;
TURBOGR_SKIP_KERNELS=1 installs without the kernels; for measurements, TURBOGR_BUILD_ISA=avx2 builds for one
instruction set alone and TURBOGR_DEFINES="-DNAME=VALUE ..." changes constants of the kernels.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CSRC = Path("csrc")
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi",
]  # fmt: skip
# Compiled once, for the baseline.
ONCE = ("runtime", "fma_peak")
# Built for small blocks too, exported with the suffix `_small`.
IN_TWO_SIZES = ("fuxi_attention", "hstu_attention")
AVX2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt", "-mf16c"]
AVX512 = [
    *AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]


def instruction_sets() -> dict[str, list[str]]:
    """Names of the variants to build, with their compiler flags."""
    known: dict[str, list[str]] = {"generic": []}
    if platform.machine().lower() in ("x86_64", "amd64"):
        known |= {"avx2": AVX2, "avx512": AVX512}
    wanted = os.environ.get("TURBOGR_BUILD_ISA")
    return {wanted: known[wanted]} if wanted else known


class BuildKernels(build_ext):
    """Compile csrc into turbogr/ops/_kernels.so; a failure leaves the package without it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        if os.environ.get("TURBOGR_SKIP_KERNELS") == "1":
            raise CompileError("TURBOGR_SKIP_KERNELS is set")
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        if shutil.which(compiler[0]) is None:
            raise CompileError(f"no C++ compiler '{compiler[0]}'; TurboGR will run on the reference operators")
        sanitize = os.environ.get("TURBOGR_SANITIZE")
        flags = [*FLAGS, "-O1", "-g", f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else FLAGS
        flags = [*flags, *shlex.split(os.environ.get("TURBOGR_DEFINES", ""))]
        objects_dir = Path(self.build_temp) / ("sanitized" if sanitize else "kernels")
        objects_dir.mkdir(parents=True, exist_ok=True)
        headers = max(path.stat().st_mtime for path in [*CSRC.glob("*.h"), Path(__file__)])

        jobs = [(CSRC / f"{stem}.cpp", objects_dir / f"{stem}.o", []) for stem in ONCE]
        for isa, isa_flags in instruction_sets().items():
            for source in sorted(CSRC.glob("*.cpp")):
                if source.stem not in ONCE:
                    jobs.append((source, objects_dir / f"{source.stem}.{isa}.o", [f"-DTURBOGR_ISA={isa}", *isa_flags]))
            for stem in IN_TWO_SIZES:
                small = [f"-DTURBOGR_ISA={isa}_small", "-DTURBOGR_SMALL_BLOCKS", *isa_flags]
                jobs.append((CSRC / f"{stem}.cpp", objects_dir / f"{stem}.{isa}_small.o", small))

        def compile_one(job: tuple[Path, Path, list[str]]) -> None:
            source, target, extra = job
            if not target.exists() or target.stat().st_mtime < max(headers, source.stat().st_mtime):
                _run([*compiler, *flags, *extra, "-c", str(source), "-o", str(target)])

        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            list(pool.map(compile_one, jobs))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        aside = library.with_suffix(f".{os.getpid()}.tmp")
        sanitizer_flags = [f"-fsanitize={sanitize}"] if sanitize else []
        _run([*compiler, "-shared", *sanitizer_flags, "-o", str(aside), *(str(target) for _, target, _ in jobs)])
        os.replace(aside, library)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 on one platform: the library does not link to Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.stderr:
        print(result.stderr, file=sys.stderr)
    if result.returncode != 0:
        raise CompileError(f"'{shlex.join(command)}' failed")


setup(
    ext_modules=[Extension("turbogr.ops._kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
