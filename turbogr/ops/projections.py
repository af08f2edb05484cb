"""The three products of a projection with a large weight, each by the provider that is fastest on this machine.

forward X·W, gradient of the input dY·Wᵀ, gradient of the weight Xᵀ·dY. Providers: `torch` is the library that PyTorch
calls by default (MKL on x86), `onednn` is oneDNN through PyTorch's switch, `turbogr` our own kernel. Which one computes
what is a `Choice`; `gemm_choice` measures it. Digits differ between providers, so a run keeps its choice. Weights that
stay in cache are multiplied inside of our fused kernels and do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from turbogr.errors import UserError, did_you_mean
from turbogr.ops import bf16_products, native
from turbogr.ops.native import Kernel, pointer

PROVIDERS = ("torch", "onednn", "turbogr")
PRODUCTS = ("forward", "input_gradient", "weight_gradient")
SIZES = ("medium", "large")

LARGE_WEIGHT = 2**20
"""Elements from which a weight is `large`; below it is `medium`."""

ENVIRONMENT = "TURBOGR_GEMM"
"""The environment variable that gives the choice where the config leaves it open."""

Choice = Mapping[tuple[str, str], str]
"""The provider by size of the weight and product."""

_gemm_kernel = Kernel(
    "gemm",
    "float *a, *b, *start, *out; int64 rows, columns, depth, a_row_stride, a_column_stride, b_row_stride, "
    "b_column_stride, start_stride, out_stride",
)


def uniform(provider: str) -> Choice:
    """One provider for everything."""
    return {(size, product): provider for size in SIZES for product in PRODUCTS}


class _State:
    choice: Choice = uniform("torch")


def parse_choice(text: str, where: str = "train.gemm") -> Choice:
    """Read a provider's name, or "medium=torch/onednn/turbogr,large=..." with the products in the order of `PRODUCTS`.

    Raises:
        UserError: another form, or an unknown name.
    """
    if "=" not in text:
        return uniform(_known(text.strip(), PROVIDERS, text, where))
    choice: dict[tuple[str, str], str] = {}
    for part in text.split(","):
        size, _, names = part.strip().partition("=")
        providers = names.split("/")
        if len(providers) != len(PRODUCTS):
            raise UserError(f"{where}={text}: '{part.strip()}' must name {len(PRODUCTS)} providers, as in {size}=a/b/c")
        for product, provider in zip(PRODUCTS, providers, strict=True):
            choice[_known(size, SIZES, text, where), product] = _known(provider.strip(), PROVIDERS, text, where)
    missing = [size for size in SIZES if (size, PRODUCTS[0]) not in choice]
    if missing:
        raise UserError(f"{where}={text}: {missing[0]}=... is missing")
    return choice


def _known(name: str, names: tuple[str, ...], text: str, where: str) -> str:
    if name not in names:
        raise UserError(f"{where}={text}: unknown '{name}', choose from {', '.join(names)}.{did_you_mean(name, names)}")
    return name


def write_choice(choice: Choice) -> str:
    """The text that `parse_choice` reads; one name if everything has the same provider."""
    providers = set(choice.values())
    if len(providers) == 1:
        return providers.pop()
    return ",".join(f"{size}={'/'.join(choice[size, product] for product in PRODUCTS)}" for size in SIZES)


def problem(provider: str) -> str | None:
    """Why a provider cannot be used in this process, None if it can; whether it is exact is measured elsewhere."""
    if provider == "turbogr":
        return native.BACKEND.problem
    if provider == "onednn" and not (torch.backends.mkldnn.is_available() and _has_switch()):
        return "this build of PyTorch has no oneDNN, or no switch that sends fp32 products to it"
    return None


def _has_switch() -> bool:
    return hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")


def use(choice: Choice) -> None:
    """Compute all products from now on by this choice.

    Raises:
        UserError: a provider that cannot be used here.
    """
    for provider in sorted(set(choice.values())):
        reason = problem(provider)
        if reason is not None:
            raise UserError(f"products by {provider} cannot be computed on this machine: {reason}")
    _State.choice = choice


def in_use() -> Choice:
    """The choice that products are computed by now."""
    return _State.choice


@contextmanager
def using(choice: Choice) -> Iterator[None]:
    """Use a choice inside a `with` block."""
    before = _State.choice
    use(choice)
    try:
        yield
    finally:
        _State.choice = before


def forward(x: Tensor, weight: Tensor, start: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return start + x @ weight for x [T, d], weight [d, n], and start [n] or [T, n]; `out` receives it if given."""
    return _compute("forward", weight, x, weight, start, out)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return grad @ weight.T for grad [T, n]."""
    return _compute("input_gradient", weight, grad, weight.t())


def weight_gradient(left: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Return left.T @ grad for left [T, d] and grad [T, n], the gradient of `weight` [d, n]."""
    return _compute("weight_gradient", weight, left.t(), grad)


def _compute(
    product: str, weight: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    provider = _State.choice["large" if weight.numel() >= LARGE_WEIGHT else "medium", product]
    return _MULTIPLY[provider](a, b, start, out)


def _by_torch(a: Tensor, b: Tensor, start: Tensor | None, out: Tensor | None) -> Tensor:
    if start is None:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    return torch.addmm(start, a, b) if out is None else torch.addmm(start, a, b, out=out)


def _by_onednn(a: Tensor, b: Tensor, start: Tensor | None, out: Tensor | None) -> Tensor:
    # The switch is one of the process. No other thread of ours multiplies matrices while a step computes.
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        return _by_torch(a, b, start, out)
    finally:
        switch.fp32_precision = before


def _by_turbogr(a: Tensor, b: Tensor, start: Tensor | None, out: Tensor | None) -> Tensor:
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    if a.dtype == torch.bfloat16 or b.dtype == torch.bfloat16:
        return bf16_products.multiply(a, b, start, torch.empty(rows, columns) if out is None else out)
    if depth == 0:
        return _by_torch(a, b, start, out)
    if out is None:
        out = a.new_empty(rows, columns)
    assert out.stride(1) == 1 or columns <= 1, "rows of the result are contiguous"
    start = start if start is None or start.stride(-1) == 1 else start.contiguous()
    _gemm_kernel(
        a.data_ptr(),
        b.data_ptr(),
        pointer(start),
        out.data_ptr(),
        rows,
        columns,
        depth,
        *a.stride(),
        *b.stride(),
        start.stride(0) if start is not None and start.dim() == 2 else 0,
        out.stride(0),
    )
    return out


_MULTIPLY: Mapping[str, Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "torch": _by_torch,
    "onednn": _by_onednn,
    "turbogr": _by_turbogr,
}
