"""The binding of the kernels: which instruction set runs, and what happens without the library."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.ops.judging import needs_kernels
from turbogr.errors import UserError
from turbogr.ops import native, registry, unique_rows

CPU = torch.device("cpu")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_kernels
def test_every_operator_has_a_compiled_backend() -> None:
    assert {service.backend for service in registry.services(CPU)} == {"cpu"}


@needs_kernels
def test_kernels_serve_fp32_on_the_cpu_alone() -> None:
    assert native.BACKEND.why_not(CPU, torch.float32) is None
    assert native.BACKEND.why_not(CPU, torch.float64) == "it computes in float32 only"
    assert native.BACKEND.why_not(torch.device("cuda"), torch.float32) == "it runs on cpu only"


@needs_kernels
def test_the_environment_chooses_the_instruction_set() -> None:
    code = "from turbogr.ops import native; print(native.isa())"
    assert run_python(code, TURBOGR_ISA="generic").stdout.strip() == "generic"
    failed = run_python(code, TURBOGR_ISA="mmx")
    assert failed.returncode != 0
    assert "instruction set 'mmx' cannot be used" in failed.stderr


@needs_kernels
def test_an_impossible_instruction_set_is_refused() -> None:
    with pytest.raises(UserError, match="choose from"):
        native.set_isa("sse9")


@pytest.mark.parametrize("content", [None, "not a library"], ids=["missing", "broken"])
def test_without_the_library_the_reference_serves_and_says_so_once(tmp_path: Path, content: str | None) -> None:
    library = tmp_path / "_kernels.so"
    if content is not None:
        library.write_text(content)
    code = (
        "import torch\n"
        "from turbogr import ops\n"
        "for _ in range(2):\n"
        "    ops.unique_rows(torch.tensor([1, 1]), 3)\n"
        "    ops.norm_linear(torch.ones(2, 2), torch.eye(2), norm='none', activation='none')\n"
        "print([s.backend for s in ops.services(torch.device('cpu')) if s.operator == 'embed'])\n"
    )
    done = run_python(code, TURBOGR_KERNELS=str(library))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['reference']"
    assert done.stderr.count("running on the slower reference operators") == 1
    reason = "are not built" if content is None else "cannot be loaded"
    assert reason in done.stderr


@needs_kernels
def test_kernels_may_be_called_from_several_threads() -> None:
    ids = torch.randint(0, 100_000, (200_000,))
    expected = unique_rows(ids, 100_000)
    with ThreadPoolExecutor(4) as pool:
        for distinct, index in pool.map(lambda _: unique_rows(ids, 100_000), range(8)):
            assert torch.equal(distinct, expected[0])
            assert torch.equal(index, expected[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a switch of the C library of Linux")
def test_kept_memory_is_not_cleared_again() -> None:
    code = (
        "import resource, torch\n"
        "from turbogr.ops import native\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(5):\n"
        "        torch.zeros(2**24)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "torch.set_num_threads(1)\n"
        "given_back = faults()\n"
        "if native.keep_freed_memory():\n"
        "    for _ in range(4):\n"
        "        faults()\n"  # until the heap has found its size
        "    print(given_back, faults())\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("this C library has no such switch")
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 10


def test_huge_pages_are_asked_for_only_where_whole_ones_fit() -> None:
    assert not native.prefer_huge_pages(torch.empty(100))
    assert not native.prefer_huge_pages(torch.empty(2**24, device="meta"))
    table = torch.empty(2**22)
    if native.prefer_huge_pages(table):
        with Path("/proc/self/smaps").open() as maps:
            assert any(line.startswith("VmFlags:") and " hg" in line for line in maps)
    assert torch.equal(table.fill_(1.0), torch.ones(2**22))
