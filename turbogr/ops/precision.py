"""What bf16 means for an operator, and the two ways in which that is computed from functions in fp32.

Training in bf16 (`train.precision`) stores activations in bf16: 8 bits of precision, the exponents of fp32. Parameters
stay fp32 tensors (the masters that the optimiser updates). An operator that is given bf16 activations computes

1. from the activations as they are: every bf16 number is a number of fp32, so nothing is lost;
2. with the matrices of parameters (`MATRICES`) rounded to bf16; biases, bias tables and all other parameters in fp32;
3. everything else in fp32: sums of products, norms, activation functions, softmax, dropout;
4. and rounds what it returns to bf16, once, to the nearest number and ties to even.

In the backward the same holds for gradients: those of activations come and go in bf16, those of parameters are sums in
fp32 and are not rounded. Activations that a backend stores for its backward are rounded to bf16: what went in, what
came out, a product before SiLU, a norm's output. Statistics of a row (its deviation, its logarithm of a sum) stay fp32.
A large gated MLP stores, and so rounds, its hidden vectors too.

A backend whose instructions multiply bf16 may also round the factors of products that it has computed itself: a norm's
output, gated rows, the weights of attention and their gradients. Its error is judged by that of plain PyTorch, in which
every step is in bf16: at most twice that, both against fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

MATRICES = frozenset({"weight", "gate_weight", "up_weight", "down_weight"})
"""Names of the arguments of operators that are factors of matrix products and parameters."""


def define_in_bf16(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The definition of an operator in bf16, from that in fp32; autograd differentiates it by the same rules."""
    names = list(signature(reference).parameters)

    def function(*args: Any) -> Any:
        wide = [_widen(name, arg, _round_matrix) for name, arg in zip(names, args, strict=True)]
        return _each(reference(*wide), lambda result: result.to(torch.bfloat16))

    return function


def compute_in_fp32(
    function: Callable[..., Any], empty_results: Callable[..., Any], names: Sequence[str]
) -> Callable[..., Any]:
    """The function itself, and for bf16 arguments what `function` computes from them in fp32.

    Results have the types of `empty_results(*args)`. `names` are those of the arguments.
    """

    def computed(*args: Any) -> Any:
        if not any(is_bf16(arg) for arg in args):
            return function(*args)
        results = function(*(_widen(name, arg, _rounded) for name, arg in zip(names, args, strict=True)))
        return _store(results, empty_results(*args))

    return computed


def is_bf16(arg: Any) -> bool:
    """Whether an argument is a tensor in bf16, or a list with one."""
    if isinstance(arg, Tensor):
        return arg.dtype == torch.bfloat16
    return isinstance(arg, list) and any(is_bf16(part) for part in arg)


def _widen(name: str, arg: Any, round_matrix: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(arg, list):
        return [_widen(name, part, round_matrix) for part in arg]
    if not isinstance(arg, Tensor) or not arg.is_floating_point():
        return arg
    if arg.dtype == torch.bfloat16:
        return arg.float()
    return round_matrix(arg) if name in MATRICES else arg


def _rounded(matrix: Tensor) -> Tensor:
    return matrix.to(torch.bfloat16).float()


def _round_matrix(matrix: Tensor) -> Tensor:
    """The rounded matrix; its gradient passes to the matrix itself, and is not rounded."""
    with torch.no_grad():
        error = _rounded(matrix) - matrix
    return matrix + error


def _each(results: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return [function(result) for result in results] if isinstance(results, list) else function(results)


def _store(results: Any, places: Any) -> Any:
    """Round the results to the types of their places."""
    if isinstance(results, Tensor):
        return results if results.dtype == places.dtype else places.copy_(results)
    return type(results)(_store(result, place) for result, place in zip(results, places, strict=True))
