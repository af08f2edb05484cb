"""A small input of every built-in operator, to compare what a device computes with the definition in float64.

A case holds tensors in float64 and integers on the CPU. `run` computes it on any device in any floating type, with all
gradients. A new operator needs a case here; a test counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr import ops
from turbogr.random import Dropout

_LENGTHS = (0, 1, 2, 31, 32, 33, 65)
_HEADS, _WIDTH, _DIM = 2, 16, 32

Compute = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """`compute` takes the `floats`, whose gradients are compared, and the `integers`, in this order."""

    operator: str
    compute: Compute
    floats: tuple[Tensor, ...]
    integers: tuple[Tensor, ...] = ()
    has_gradients: bool = True

    def run(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return the outputs, then the gradients of the sum of each output times fixed numbers, all on the CPU."""
        floats = [x.to(device, dtype, copy=True).requires_grad_(self.has_gradients) for x in self.floats]
        integers = [x.to(device, copy=True) for x in self.integers]
        found = self.compute(*floats, *integers)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        results = [output.detach().cpu() for output in outputs]
        if self.has_gradients:
            random = torch.Generator().manual_seed(1)
            sums = [
                (output * torch.randn(output.shape, dtype=torch.float64, generator=random).to(device, dtype)).sum()
                for output in outputs
            ]
            grads = torch.autograd.grad(torch.stack(sums).sum(), floats, allow_unused=True)
            results += [torch.zeros_like(x).cpu() if g is None else g.cpu() for x, g in zip(floats, grads, strict=True)]
        return results


def all_cases() -> list[Case]:
    """Return a case of every built-in operator, some with several."""
    make = _Maker()
    num = make.num_tokens
    qkv = [make.normal(num, _HEADS, _WIDTH) for _ in range(3)]
    position, buckets = make.normal(2 * make.max_len - 1, scale=0.3), make.normal(33, scale=0.3)
    times = (make.offsets, make.next_times, make.times)
    x, square = make.normal(num, _DIM), make.normal(_DIM, _DIM, scale=0.2)
    rows, queries = make.normal(50, _DIM), make.normal(num, _DIM)
    index, table = make.integers(50, num), make.normal(50, _DIM)
    distinct, grad = make.distinct(50, 20), make.normal(20, _DIM)
    drop = Dropout(0.3, 11)

    def attend(q: Tensor, k: Tensor, v: Tensor, p: Tensor, t: Tensor, o: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ops.hstu_attention(q, k, v, o, ops.RelativeBias(a, b, p, t), max_len=make.max_len)

    def channels(q: Tensor, k: Tensor, v: Tensor, p: Tensor, t: Tensor, o: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ops.fuxi_attention(q, k, v, o, ops.RelativeBias(a, b, p, t), max_len=make.max_len)

    def in_seconds(v: Tensor, p: Tensor, r: Tensor, t: Tensor, o: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        functions = ops.InversePowerBias(a, b, p, r), ops.SecondsDecayBias(a, b, p, t)
        return [ops.fuxi_attention(None, None, v, o, function, max_len=make.max_len) for function in functions]

    def by_phase(v: Tensor, turns: Tensor, gaps: Tensor, decay: Tensor, o: Tensor) -> Tensor:
        fixed = turns.detach()
        return ops.periodic_attention(v, fixed[..., :2], fixed[..., 2:], gaps.detach(), decay, o)

    def adam(weight: Tensor, mean: Tensor, square: Tensor, grad: Tensor, index: Tensor) -> list[Tensor]:
        ops.row_adam_(weight, mean, square, index, grad, step=3, lr=0.1, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
        return [weight, mean, square]

    def adagrad(weight: Tensor, square: Tensor, grad: Tensor, index: Tensor) -> list[Tensor]:
        ops.row_adagrad_(weight, square, index, grad, lr=0.1, eps=1e-8)
        return [weight, square]

    return [
        Case("hstu_attention", attend, (*qkv, position, buckets), times),
        Case("fuxi_attention", channels, (*qkv, position, buckets), times),
        Case(
            "fuxi_seconds_attention",
            in_seconds,
            (qkv[2], position, _numbers(0.5, 0.6), _numbers(0.5, 0.2, 0.9)),
            times,
        ),
        Case("retention", lambda q, k, v, d, o: ops.retention(q, k, v, o, d), (*qkv, _numbers(0.05, 0.5)), times[:1]),
        Case(
            "periodic_attention",
            by_phase,
            (make.normal(num, 6, 4), make.normal(num, 3, 4), make.normal(num, 3).square(), -_numbers(0.1, 1.0, 0.0)),
            times[:1],
        ),
        Case(
            "softmax_attention",
            lambda q, k, v, o: ops.softmax_attention(q, k, v, o, scale=0.25),
            tuple(qkv),
            (make.offsets,),
        ),
        Case(
            "norm_linear",
            lambda x, w: ops.norm_linear(x, w, norm="layer", activation="silu"),
            (x, square),
        ),
        Case(
            "gated_linear",
            lambda x, g, r, w, keys: ops.gated_linear(x, g, r, w, norm="layer", dropout=drop, keys=keys),
            (x, make.normal(num, _DIM), make.normal(num, _DIM), square),
            (make.keys,),
        ),
        Case(
            "gated_mlp",
            lambda x, a, b, c, keys: ops.gated_mlp(x, a, b, c, norm="rms", dropout=drop, keys=keys),
            (x, square, make.normal(_DIM, _DIM, scale=0.2), make.normal(_DIM, _DIM, scale=0.2)),
            (make.keys,),
        ),
        Case(
            "embed",
            lambda rows, p, i, at, keys: ops.embed(rows, i, p, at, scale=3.0, dropout=drop, keys=keys),
            (rows, make.normal(make.max_len, _DIM)),
            (index, make.positions, make.keys),
        ),
        Case("keyed_dropout", lambda x, keys: ops.keyed_dropout(x, drop, keys), (x,), (make.keys,)),
        Case("look_up_rows", lambda rows, i: ops.look_up_rows(rows, i, [3, i.numel() - 3]), (rows,), (index,)),
        Case(
            "sampled_softmax",
            lambda q, r, p, n: ops.sampled_softmax(q, r, p, n, temperature=0.05),
            (queries, rows),
            (index, make.integers(50, num, 13)),
        ),
        Case(
            "sampled_logits",
            lambda q, r, i: ops.sampled_logits(q, r, i, temperature=0.05),
            (queries, rows),
            (make.integers(50, num, 5),),
        ),
        Case("full_softmax", lambda q, r, t: ops.full_softmax(q, r, t, temperature=0.05), (queries, rows), (index,)),
        Case(
            "row_adam_",
            adam,
            (table, make.normal(50, _DIM), make.normal(50, _DIM).square(), grad),
            (distinct,),
            has_gradients=False,
        ),
        Case("row_adagrad_", adagrad, (table, make.normal(50, _DIM).square(), grad), (distinct,), has_gradients=False),
        Case("random_integers", lambda k: ops.random_integers(k, 5, 7, 1000), (), (make.keys,), has_gradients=False),
        Case("unique_rows", lambda i: ops.unique_rows(i, 50), (), (index,), has_gradients=False),
    ]


def _numbers(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class _Maker:
    """Draws the tensors of the cases."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.num_tokens, self.max_len = sum(_LENGTHS), max(_LENGTHS) + 3
        self.offsets = torch.tensor([0, *torch.tensor(_LENGTHS).cumsum(0).tolist()])
        self.times = self.integers(10**7, self.num_tokens).cumsum(0)
        self.next_times = self.times + 3600
        self.keys = torch.arange(self.num_tokens) * 7919
        self.positions = torch.cat([torch.arange(length) for length in _LENGTHS])

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, dtype=torch.float64, generator=self._random)

    def integers(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, generator=self._random)

    def distinct(self, bound: int, count: int) -> Tensor:
        return torch.randperm(bound, generator=self._random)[:count].sort().values
