"""Operators that find no memory for their scratch raise MemoryError, on any number of threads; the process goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tests.ops.judging import needs_kernels
from tests.ops.test_native import run_python
from turbogr.operator_cases import Case, all_cases
from turbogr.ops import native

pytestmark = needs_kernels

CASES = all_cases()
WITHOUT_SCRATCH = {
    "embed",
    "keyed_dropout",
    "look_up_rows",
    "row_adam_",
    "row_adagrad_",
    "random_integers",
    "unique_rows",
}


def limit_scratch(num_bytes: int) -> None:
    native.library().turbogr_limit_scratch(ctypes.c_size_t(num_bytes))


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
    limit_scratch(2**64 - 1)


@pytest.mark.parametrize("case", CASES, ids=[case.operator for case in CASES])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_an_operator_without_scratch_memory_raises_and_then_works_again(case: Case, threads: None) -> None:
    def run() -> list[torch.Tensor]:
        return case.run(torch.device("cpu"), torch.float32)

    expected = run()
    limit_scratch(0)
    if case.operator in WITHOUT_SCRATCH:
        run()
    else:
        with pytest.raises(MemoryError, match="no memory for the working buffers of the kernel"):
            run()
    limit_scratch(2**64 - 1)
    for value, again in zip(expected, run(), strict=True):
        assert torch.equal(value, again)


@pytest.mark.parametrize(
    ("operator", "kernel"),
    [("hstu_attention", "hstu"), ("gated_mlp", "gated_mlp"), ("sampled_logits", "sampled_logits")],
)
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_backward_without_scratch_memory_raises(operator: str, kernel: str, threads: None) -> None:
    (case,) = (case for case in CASES if case.operator == operator)
    floats = [x.float().requires_grad_() for x in case.floats]
    output = case.compute(*floats, *case.integers)
    assert isinstance(output, torch.Tensor)
    limit_scratch(0)
    with pytest.raises(MemoryError, match=rf"the kernel {kernel}_backward"):
        output.sum().backward()
    limit_scratch(2**64 - 1)
    case.compute(*floats, *case.integers)


def test_memory_that_the_system_does_not_give() -> None:
    code = (
        "import resource, torch\n"
        "from turbogr import ops\n"
        "from turbogr.ops import native\n"
        "torch.set_num_threads(1)\n"
        "width = 10_000_000\n"
        "x, out = torch.ones(1, width), torch.empty(1, width)\n"
        "(activate,) = (kernel for kernel in native.kernels() if kernel.name == 'activate')\n"
        "call = (x.data_ptr(), native.addresses([out]), native.int64s([width]), 1, 1, width, 1)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    activate(*call)\n"
        "except MemoryError as error:\n"
        "    print(error)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "activate(*call)\n"
        "assert torch.allclose(out, torch.nn.functional.silu(x))\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "no memory for the working buffers of the kernel activate"
