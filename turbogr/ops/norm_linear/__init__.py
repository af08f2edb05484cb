"""norm -> linear -> activation: the projection before attention, in as few passes over memory as the GEMM allows."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from turbogr.ops import native, registry
from turbogr.ops.checks import check_shape
from turbogr.ops.norm_linear import cpu, reference

Norm = Literal["layer", "rms", "none"]
Activation = Literal["silu", "none"]


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm, activation: Activation, eps: float = 1e-6
) -> Tensor:
    """Return activation(norm(x) @ weight + bias) for x [T, d], weight [d, out], bias [out]; the norm has no parameters.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("x", x, (None, None))
    check_shape("weight", weight, (x.shape[1], None))
    if bias is not None:
        check_shape("bias", bias, (weight.shape[1],))
    out: Tensor = registry.choose("norm_linear", x.device, x.dtype)(x, weight, bias, norm, activation, eps)
    return out


registry.register_reference("norm_linear", reference.norm_linear)
registry.register("norm_linear", registry.Backend("cpu", cpu.norm_linear, native.why_not))
