"""How a compiled operator is judged: its error may be twice that of plain fp32 PyTorch, both against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from turbogr.ops import native, registry

needs_kernels = pytest.mark.skipif(native.BACKEND.problem is not None, reason="the C++ kernels are not built")


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, backend: str, dtype: torch.dtype
) -> list[Tensor]:
    """Output of function(*inputs) and the gradient of each input, computed in `dtype` by one backend."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    with registry.backend(backend):
        out = function(*leaves)
        if out.requires_grad:  # the definition of nothing at all is a constant
            grads = torch.autograd.grad(out, leaves, grad.to(dtype))
        else:
            grads = tuple(torch.zeros_like(x) for x in leaves)
    return [out.detach().double(), *(g.double() for g in grads)]


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Let the reference compute bf16 step by step in bf16, as PyTorch does, instead of by our definition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_in_precision", lambda implementation, dtype: implementation)
        yield


def assert_close_as_plain(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, names: Sequence[str]
) -> None:
    """Compare the compiled backend with the definition, forward and every gradient."""
    exact = with_gradients(function, inputs, grad, "reference", torch.float64)
    plain = with_gradients(function, inputs, grad, "reference", torch.float32)
    ours = with_gradients(function, inputs, grad, "cpu", torch.float32)
    for name, e, p, o in zip(("out", *names), exact, plain, ours, strict=True):
        assert o.shape == e.shape, name
        if e.numel() == 0:
            continue
        # A sum of a few numbers can come out exact in plain fp32 by luck, hence the floor.
        floor = 1e-6 * max(1e-3, float(e.abs().max()))
        assert float((o - e).abs().max()) <= 2 * float((p - e).abs().max()) + floor, name


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Use one instruction set, or skip the test where the processor does not have it."""
    if name not in native.available_isas():
        pytest.skip(f"this processor does not run {name}")
    before = native.isa()
    native.set_isa(name)
    try:
        yield
    finally:
        native.set_isa(before)


def by_number_of_threads(run: Callable[[], list[Tensor]], counts: Sequence[int] = (1, 2, 3)) -> list[list[Tensor]]:
    """Results of `run` on each number of threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results


def assert_independent_of_threads(run: Callable[[], list[Tensor]]) -> None:
    """Require the same bits on 1, 2 and 3 threads."""
    first, *others = by_number_of_threads(run)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
