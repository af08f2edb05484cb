"""Random calls of every operator: jagged, tiny, odd and partly wrong; call `number` is a function of the seed.

Most calls are sound and must be computed. Some are damaged in one place, so that the operator must refuse them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from turbogr import ops
from turbogr.random import Dropout

_LENGTHS = (0, 0, 1, 1, 2, 3, 5, 8, 13)
_LONG = (31, 32, 33, 64, 65, 100, 257)
_WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 33)
_POOL_SIZE = 1 << 16
_DAMAGED = 0.15
_EXTREMES = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**31, 2**62, 2**63 - 1)

_BIASES = (ops.RelativeBias, ops.DecayBias, ops.InversePowerBias, ops.SecondsDecayBias)

Damage = Callable[["Call"], None]


@dataclass
class Call:
    """A call of `function` with `args`.

    `leaves` are the names of floating tensors whose gradients may be asked for; `damages` are ways to make the call
    unsound. `calm` means that all values are of a usual size, so that results are finite and can be compared.
    """

    operator: str
    function: Callable[..., Any]
    args: dict[str, Any]
    leaves: list[str] = field(default_factory=list)
    damages: list[tuple[str, Damage]] = field(default_factory=list)
    calm: bool = True
    damage: str | None = None
    expanded_gradient: bool = False
    in_place: tuple[str, ...] = ()

    def run(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Compute results and gradients; in another floating type if one is given.

        Raises:
            ValueError: the operator refuses the call.
        """
        args = self.args
        if dtype is not None or self.in_place:
            args = {name: _copy(value, dtype) for name, value in args.items()}
        leaves = [args[name].requires_grad_() for name in self.leaves if args[name] is not None]
        found = self.function(**args)
        if self.in_place:
            return [args[name] for name in self.in_place]
        outputs = [found] if isinstance(found, Tensor) else list(found)
        results = [output.detach() for output in outputs]
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            grads: Sequence[Tensor | None] = [None for _ in leaves]
        elif leaves:
            if self.expanded_gradient:
                total = torch.stack([output.sum().float() for output in differentiable]).sum()
                grads = torch.autograd.grad(total, leaves, allow_unused=True)
            else:
                weights = [_POOL[: out.numel()].to(out.dtype).view_as(out) for out in differentiable]
                grads = torch.autograd.grad(differentiable, leaves, weights, allow_unused=True)
        if leaves:
            results += [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]
        return results


def _copy(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype if value.is_floating_point() else None, copy=True)
    if dtype is not None and isinstance(value, _BIASES):
        return type(value)(*(_copy(part, dtype) for part in value))
    return value


def draw_call(seed: int, number: int, operators: Sequence[str] | None = None) -> Call:
    """Return call `number` of a seed."""
    choose = random.Random((seed << 40) + number)
    names = list(operators or OPERATORS)
    drawn = _Draw(choose)
    call = OPERATORS[names[number % len(names)]](drawn)
    call.calm = drawn.calm
    call.expanded_gradient = choose.random() < 0.3
    call.leaves = [name for name in call.leaves if choose.random() < 0.7]
    if choose.random() < _DAMAGED and call.damages:
        call.damage, damage = choose.choice(call.damages)
        damage(call)
    return call


class _Draw:
    """Draws the parts of a call."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.calm = choose.random() < 0.85
        self.narrow = choose.random() < 0.15

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations of models."""
        return torch.bfloat16 if self.narrow else torch.float32

    def chance(self, probability: float) -> bool:
        return self.choose.random() < probability

    def width(self) -> int:
        return self.choose.choice(_WIDTHS)

    def lengths(self) -> list[int]:
        found = [self.choose.choice(_LENGTHS) for _ in range(self.choose.choice((0, 1, 1, 2, 3, 5)))]
        if found and self.chance(0.02):
            found[0] = self.choose.choice(_LONG)
        return found

    def count(self) -> int:
        return sum(self.lengths())

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of a usual size, or, where the call is not calm, huge ones, tiny ones, infinities and NaN."""
        size = math.prod(shape)
        start = self.choose.randrange(_POOL_SIZE)
        values = _POOL[start : start + size] if start + size <= _POOL.numel() else _POOL[:size]
        out = (values.clone() if scale == 1.0 else values * scale).view(shape)  # with redzones of its own
        if not self.calm and size:
            kind = self.choose.choice((1e30, 1e-42, 0.0, math.inf, math.nan, None))
            if kind is None or self.chance(0.5):
                out.view(-1)[self.choose.randrange(size)] = kind if kind is not None else -math.inf
            else:
                out = out * kind
        out = out.to(dtype)
        return self.strided(out) if self.chance(0.15) else out

    def strided(self, tensor: Tensor) -> Tensor:
        """The same values as a part of a wider tensor."""
        if tensor.numel() == 0:
            return tensor
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]

    def integers(self, bound: int, *shape: int) -> Tensor:
        size = math.prod(shape)
        start = self.choose.randrange(_POOL_SIZE)
        words = _WORDS[start : start + size] if start + size <= _WORDS.numel() else _WORDS[:size]
        out = (words % max(bound, 1)).view(shape)
        return out.int() if self.chance(0.3) else out

    def times(self, count: int) -> Tensor:
        if self.chance(0.1):
            return torch.tensor([self.choose.choice(_EXTREMES) for _ in range(count)], dtype=torch.int64)
        return self.integers(10**8, count).long().cumsum(0)

    def keys(self, count: int) -> Tensor:
        if self.chance(0.1):
            return torch.tensor([self.choose.choice(_EXTREMES) for _ in range(count)], dtype=torch.int64)
        return _WORDS[:count].clone()

    def dropout(self) -> Dropout | None:
        if self.chance(0.3):
            return None
        return Dropout(self.choose.choice((0.0, 0.1, 0.5, 0.99)), self.choose.getrandbits(63))

    def ranges(self, lengths: list[int]) -> ops.KeyRanges | None:
        if self.chance(0.6):
            return None
        first, last = [], []
        for length in lengths:
            first += [self.choose.randint(0, length + 2) for _ in range(length)]
            last += [self.choose.randint(-2, length) for _ in range(length)]
        return ops.KeyRanges(torch.tensor(first, dtype=torch.int64), torch.tensor(last, dtype=torch.int64))


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


# Ways to damage a call.


def _replace(name: str, change: Callable[[Any], Any]) -> Damage:
    def damage(call: Call) -> None:
        call.args[name] = change(call.args[name])

    return damage


def _longer(name: str) -> tuple[str, Damage]:
    return f"{name} has a row too many", _replace(name, lambda x: torch.cat([x, x.new_zeros(1, *x.shape[1:])]))


def _deeper(name: str) -> tuple[str, Damage]:
    return f"{name} has a dimension too many", _replace(name, lambda x: x.unsqueeze(0))


def _other_type(name: str) -> tuple[str, Damage]:
    return f"{name} is of another type", _replace(name, lambda x: x.to(torch.float16))


def _out_of_range(draw: _Draw, name: str, bound: int, tensor: Tensor) -> list[tuple[str, Damage]]:
    if tensor.numel() == 0:
        return []
    wrong, at = draw.choose.choice((-1, bound, 2**40, -(2**63), 2**63 - 1)), draw.choose.randrange(tensor.numel())

    def change(x: Tensor) -> Tensor:
        x = x.long().clone()
        x.view(-1)[at] = wrong
        return x

    return [
        (f"{name} holds {wrong}", _replace(name, change)),
        (f"{name} is floating", _replace(name, lambda x: x.float())),
    ]


def _wrong_offsets(draw: _Draw, lengths: list[int], name: str = "offsets") -> list[tuple[str, Damage]]:
    def bump(by: int, at: int) -> Damage:
        def change(x: Tensor) -> Tensor:
            x = x.clone()
            x[at] += by
            return x

        return _replace(name, change)

    huge = draw.choose.choice((1, -1, 2**40, 2**63 - 1 - sum(lengths)))
    found = [
        (f"{name} end {huge} off", bump(huge, -1)),
        (f"{name} are int32", _replace(name, lambda x: x.int())),
        (f"{name} are empty", _replace(name, lambda x: x[:0])),
        (f"{name} begin at 1", bump(1, 0)),
    ]
    if len(lengths) > 1:
        at = draw.choose.randrange(1, len(lengths))
        found.append((f"{name} decrease", bump(-sum(lengths) - 1, at)))
    return found


# The operators.


def _attention(draw: _Draw, with_values_alone: bool = False) -> tuple[dict[str, Any], list[int], list[Any], int]:
    lengths = draw.lengths()
    count, heads = sum(lengths), draw.choose.choice((1, 1, 2, 3))
    size, value_size = draw.width(), draw.width()
    max_len = max([1, *lengths]) + draw.choose.choice((0, 0, 1, 40, 250))
    args: dict[str, Any] = {
        "q": draw.normal(count, heads, size, dtype=draw.dtype),
        "k": draw.normal(count, heads, size, dtype=draw.dtype),
        "v": draw.normal(count, heads, value_size, dtype=draw.dtype),
        "offsets": _offsets(lengths),
        "visible": draw.ranges(lengths),
    }
    if with_values_alone and draw.chance(0.3):
        args["q"] = args["k"] = None
    damages = [*_wrong_offsets(draw, lengths), _deeper("v")]
    if args["q"] is not None:
        damages += [_longer("q"), _longer("k"), _other_type("k")]
    if args["visible"] is not None and count:
        at = draw.choose.randrange(count)

        def too_far(ranges: ops.KeyRanges) -> ops.KeyRanges:
            last = ranges.last.clone()
            last[at] = draw.choose.choice((max(lengths) + 1, 2**62))
            return ranges._replace(last=last)

        def negative(ranges: ops.KeyRanges) -> ops.KeyRanges:
            first = ranges.first.clone()
            first[at] = draw.choose.choice((-1, -(2**62)))
            return ranges._replace(first=first)

        damages += [("visible ends too late", _replace("visible", too_far))]
        damages += [("visible begins before 0", _replace("visible", negative))]
    return args, lengths, damages, max_len


def _relative_bias(draw: _Draw, count: int, max_len: int) -> ops.RelativeBias:
    return ops.RelativeBias(
        draw.times(count),
        draw.times(count),
        draw.normal(2 * max_len - 1),
        draw.normal(draw.choose.choice((1, 2, 33, 65))),
    )


def _hstu_attention(draw: _Draw) -> Call:
    args, lengths, damages, max_len = _attention(draw)
    count = sum(lengths)
    if draw.chance(0.8):
        args["bias"] = bias = _relative_bias(draw, count, max_len)
        wrong = bias._replace(position_weight=draw.normal(2 * max_len))
        late = bias._replace(key_times=draw.times(count + 1))
        damages += [("position_weight is too long", _replace("bias", lambda _: wrong))]
        damages += [("a time too many", _replace("bias", lambda _: late))]
    if draw.chance(0.3):
        args["row_scale"] = draw.choose.choice((0.5, draw.normal(count)))
        if isinstance(args["row_scale"], Tensor):
            damages += [_longer("row_scale")]
    if lengths and max(lengths) > 1:
        damages.append(("max_len is too short", _replace("max_len", lambda _: max(lengths) - 1)))
    args |= {"max_len": max_len, "alpha": draw.choose.choice((1.0, 0.25, -3.0))}
    return Call("hstu_attention", ops.hstu_attention, args, ["q", "k", "v"], damages)


def _fuxi_attention(draw: _Draw) -> Call:
    args, lengths, damages, max_len = _attention(draw, with_values_alone=True)
    count = sum(lengths)
    if draw.chance(0.3):
        decay = torch.tensor([draw.choose.uniform(-1, 1), draw.choose.uniform(0.1, 1), draw.choose.uniform(0.1, 0.9)])
        args["bias"] = ops.DecayBias(draw.times(count), draw.times(count), draw.normal(2 * max_len - 1), decay)
    else:
        args["bias"] = _relative_bias(draw, count, max_len)
    args["max_len"] = max_len
    leaves = [name for name in ("q", "k", "v") if args[name] is not None]
    if args["q"] is not None:
        damages.append(("q is missing", _replace("q", lambda _: None)))
    return Call("fuxi_attention", ops.fuxi_attention, args, leaves, damages)


def _fuxi_seconds_attention(draw: _Draw) -> Call:
    args, lengths, damages, max_len = _attention(draw, with_values_alone=True)
    count, uniform = sum(lengths), draw.choose.uniform
    times = draw.times(count), draw.times(count), draw.normal(2 * max_len - 1)
    bias: ops.InversePowerBias | ops.SecondsDecayBias
    if draw.chance(0.5):
        bias = ops.InversePowerBias(*times, torch.tensor([uniform(-1, 1), uniform(0.1, 1.5)]))
    else:
        bias = ops.SecondsDecayBias(*times, torch.tensor([uniform(-1, 1), uniform(0.1, 1), uniform(0.1, 0.9)]))
    longer, late = torch.cat([bias[3], bias[3][:1]]), draw.times(count + 1)
    damages += [
        ("a parameter too many", _replace("bias", lambda bias: type(bias)(*bias[:3], longer))),
        (
            "position_weight is too long",
            _replace("bias", lambda bias: bias._replace(position_weight=bias[2].repeat(2))),
        ),
        ("a time too many", _replace("bias", lambda bias: bias._replace(key_times=late))),
    ]
    if args["q"] is not None:
        damages.append(("q is missing", _replace("q", lambda _: None)))
    args |= {"bias": bias, "max_len": max_len}
    leaves = [name for name in ("q", "k", "v") if args[name] is not None]
    return Call("fuxi_seconds_attention", ops.fuxi_attention, args, leaves, damages)


def _retention(draw: _Draw) -> Call:
    lengths, heads = draw.lengths(), draw.choose.choice((1, 1, 2, 3))
    count, size = sum(lengths), draw.width()
    args = {
        "q": draw.normal(count, heads, size, dtype=draw.dtype),
        "k": draw.normal(count, heads, size, dtype=draw.dtype),
        "v": draw.normal(count, heads, draw.width(), dtype=draw.dtype),
        "offsets": _offsets(lengths),
        "decay": draw.normal(heads, scale=draw.choose.choice((0.0, 1e-3, 1.0, 30.0))).abs(),
    }
    damages = [*_wrong_offsets(draw, lengths), _deeper("v"), _other_type("k")]
    damages += [_longer(name) for name in ("q", "k", "v", "decay")]
    return Call("retention", ops.retention, args, ["q", "k", "v", "decay"], damages)


def _periodic_attention(draw: _Draw) -> Call:
    lengths, periods = draw.lengths(), draw.choose.choice((1, 1, 2, 3))
    count = sum(lengths)
    query, key = (draw.normal(count, periods, scale=10.0) for _ in range(2))
    args = {
        "v": draw.normal(count, 2 * periods, draw.width(), dtype=draw.dtype),
        "query_turns": torch.stack([query.sin(), query.cos()], dim=2),
        "key_turns": torch.stack([key.sin(), key.cos()], dim=2),
        "gaps": draw.normal(count, periods, scale=draw.choose.choice((0.0, 1e-3, 1.0, 1e4))).abs(),
        "log_decay": -draw.normal(periods, scale=draw.choose.choice((0.0, 1e-3, 1.0))).abs(),
        "offsets": _offsets(lengths),
    }
    damages = [*_wrong_offsets(draw, lengths), _deeper("v"), _other_type("gaps")]
    damages += [_longer(name) for name in ("v", "query_turns", "key_turns", "gaps", "log_decay")]
    return Call("periodic_attention", ops.periodic_attention, args, ["v", "log_decay"], damages)


def _softmax_attention(draw: _Draw) -> Call:
    args, _, damages, max_len = _attention(draw)
    args |= {"scale": draw.choose.choice((1.0, 0.1)), "max_len": draw.choose.choice((None, max_len))}
    return Call("softmax_attention", ops.softmax_attention, args, ["q", "k", "v"], damages)


def _norm_linear(draw: _Draw) -> Call:
    count, width, pieces = draw.count(), draw.width(), [draw.width() for _ in range(draw.choose.choice((1, 1, 3)))]
    args = {
        "x": draw.normal(count, width, dtype=draw.dtype),
        "weight": draw.normal(width, sum(pieces), scale=0.3),
        "bias": draw.normal(sum(pieces)) if draw.chance(0.5) else None,
        "widths": pieces,
        "norm": draw.choose.choice(("layer", "rms", "none")),
        "activation": draw.choose.choice(("silu", "none")),
    }
    damages = [
        _longer("weight"),
        _deeper("x"),
        ("widths do not add up", _replace("widths", lambda widths: [*widths, 1])),
        ("norm is unknown", _replace("norm", lambda _: "batch")),
    ]
    leaves = ["x", "weight", *(["bias"] if args["bias"] is not None else [])]
    return Call("norm_linear", ops.norm_linear_pieces, args, leaves, damages)


def _gated_linear(draw: _Draw) -> Call:
    count, width, out = draw.count(), draw.width(), draw.width()
    args = {
        "x": draw.normal(count, width, dtype=draw.dtype),
        "gate": draw.normal(count, width, dtype=draw.dtype),
        "residual": draw.normal(count, out, dtype=draw.dtype),
        "weight": draw.normal(width, out, scale=0.3),
        "bias": draw.normal(out) if draw.chance(0.5) else None,
        "norm": draw.choose.choice(("layer", "rms", "none")),
        "dropout": draw.dropout(),
        "keys": draw.keys(count),
    }
    damages = [_longer("x"), _longer("gate"), _longer("residual"), _longer("weight"), _other_type("gate")]
    if args["dropout"] is not None:
        damages += [_longer("keys"), ("keys are missing", _replace("keys", lambda _: None))]
    leaves = ["x", "gate", "residual", "weight", *(["bias"] if args["bias"] is not None else [])]
    return Call("gated_linear", ops.gated_linear, args, leaves, damages)


def _gated_mlp(draw: _Draw) -> Call:
    count, width, hidden = draw.count(), draw.width(), draw.width()
    args = {
        "x": draw.normal(count, width, dtype=draw.dtype),
        "gate_weight": draw.normal(width, hidden, scale=0.3),
        "up_weight": draw.normal(width, hidden, scale=0.3),
        "down_weight": draw.normal(hidden, width, scale=0.3),
        "norm": draw.choose.choice(("layer", "rms", "none")),
        "dropout": draw.dropout(),
        "keys": draw.keys(count),
    }
    damages = [_longer("gate_weight"), _longer("up_weight"), _longer("down_weight"), _deeper("x")]
    if args["dropout"] is not None:
        damages += [_longer("keys")]
    return Call("gated_mlp", ops.gated_mlp, args, ["x", "gate_weight", "up_weight", "down_weight"], damages)


def _embed(draw: _Draw) -> Call:
    count, width, rows, places = draw.count(), draw.width(), draw.choose.randint(1, 20), draw.choose.randint(1, 20)
    args = {
        "rows": draw.normal(rows, width),
        "index": draw.integers(rows, count),
        "position_rows": draw.normal(places, width),
        "positions": draw.integers(places, count),
        "scale": 3.0,
        "dropout": draw.dropout(),
        "keys": draw.keys(count),
    }
    damages = [
        *_out_of_range(draw, "index", rows, args["index"]),
        *_out_of_range(draw, "positions", places, args["positions"]),
        _longer("positions"),
        _deeper("rows"),
        _other_type("position_rows"),
    ]
    return Call("embed", ops.embed, args, ["rows", "position_rows"], damages)


def _keyed_dropout(draw: _Draw) -> Call:
    count = draw.count()
    x = draw.normal(count, draw.width(), dtype=draw.dtype)
    args = {"x": x, "dropout": draw.dropout(), "keys": draw.keys(count)}
    damages = [_longer("x"), _deeper("x"), ("keys are int32", _replace("keys", lambda x: x.int()))]
    return Call("keyed_dropout", ops.keyed_dropout, args, ["x"], damages)


def _look_up_rows(draw: _Draw) -> Call:
    counts, rows = draw.lengths() or [0], draw.choose.randint(1, 20)
    args = {
        "rows": draw.normal(rows, draw.width()),
        "index": draw.integers(rows, sum(counts)),
        "counts": counts,
    }
    damages = [
        *_out_of_range(draw, "index", rows, args["index"]),
        ("counts do not add up", _replace("counts", lambda counts: [*counts, 1])),
        ("a count is negative", _replace("counts", lambda counts: [*counts, 1, -1])),
    ]
    return Call("look_up_rows", ops.look_up_rows, args, ["rows"], damages)


def _scores(draw: _Draw) -> tuple[dict[str, Any], int, int]:
    count, width, rows = draw.count(), draw.width(), draw.choose.randint(1, 20)
    args = {
        "queries": draw.normal(count, width),
        "rows": draw.normal(rows, width),
        "temperature": draw.choose.choice((0.05, 1.0)),
        "normalize": draw.chance(0.7),
    }
    return args, count, rows


_WRONG_TEMPERATURE = ("temperature is 0", _replace("temperature", lambda _: 0.0))


def _sampled_softmax(draw: _Draw) -> Call:
    args, count, rows = _scores(draw)
    negatives = draw.choose.randint(0, 9)
    args |= {"positives": draw.integers(rows, count), "precision": draw.choose.choice(("fp32", "fp16", "int8"))}
    args |= {"keep": draw.chance(0.7), "log_q": draw.normal(rows) if draw.chance(0.3) else None}
    damages: list[tuple[str, Damage]] = []
    groups = count
    if draw.chance(0.4):
        lengths = _parts(draw, count)
        groups = len(lengths)
        args["groups"] = _offsets(lengths)
        damages += _wrong_offsets(draw, lengths, "groups")
        damages.append(("a group too many", _replace("groups", lambda x: torch.cat([x[:1], x]))))
    args["negatives"] = draw.integers(rows, groups, negatives)
    damages += [
        *_out_of_range(draw, "positives", rows, args["positives"]),
        *_out_of_range(draw, "negatives", rows, args["negatives"]),
        _longer("positives"),
        _longer("negatives"),
        _other_type("rows"),
        _WRONG_TEMPERATURE,
    ]
    return Call("sampled_softmax", ops.sampled_softmax, args, ["queries", "rows"], damages)


def _parts(draw: _Draw, count: int) -> list[int]:
    """Lengths of non-empty groups of `count` positions."""
    found = []
    while count:
        found.append(draw.choose.randint(1, count))
        count -= found[-1]
    return found


def _sampled_logits(draw: _Draw) -> Call:
    args, count, rows = _scores(draw)
    args["index"] = draw.integers(rows, count, draw.choose.randint(0, 9))
    damages = [*_out_of_range(draw, "index", rows, args["index"]), _longer("index"), _deeper("rows")]
    damages.append(_WRONG_TEMPERATURE)
    return Call("sampled_logits", ops.sampled_logits, args, ["queries", "rows"], damages)


def _full_softmax(draw: _Draw) -> Call:
    args, count, rows = _scores(draw)
    args["targets"] = draw.integers(rows, count)
    damages = [*_out_of_range(draw, "targets", rows, args["targets"]), _longer("targets"), _WRONG_TEMPERATURE]
    return Call("full_softmax", ops.full_softmax, args, ["queries", "rows"], damages)


def _updates(draw: _Draw) -> tuple[dict[str, Any], list[tuple[str, Damage]]]:
    rows, width = draw.choose.randint(1, 20), draw.width()
    distinct = sorted(draw.choose.sample(range(rows), draw.choose.randint(0, rows)))
    args: dict[str, Any] = {
        "weight": draw.normal(rows, width).contiguous(),
        "square": draw.normal(rows, width).contiguous().square(),
        "index": torch.tensor(distinct, dtype=torch.int64),
        "lr": 0.1,
        "eps": 1e-8,
    }
    count = len(distinct)
    damages = [*_out_of_range(draw, "index", rows, args["index"]), _longer("square"), _other_type("grad")]
    if draw.chance(0.4):
        count = draw.count() if distinct else 0
        args["places"] = draw.integers(len(distinct), count)
        damages += _out_of_range(draw, "places", len(distinct), args["places"])
    args["grad"] = draw.normal(count, width)
    return args, [*damages, _longer("grad")]


def _row_adam(draw: _Draw) -> Call:
    args, damages = _updates(draw)
    args["mean"] = draw.normal(*args["weight"].shape).contiguous()
    args |= {"step": draw.choose.choice((1, 2, 10**6)), "betas": (0.9, 0.98), "weight_decay": 0.1}
    damages += [("step is 0", _replace("step", lambda _: 0)), _longer("mean")]
    return Call("row_adam_", ops.row_adam_, args, [], damages, in_place=("weight", "mean", "square"))


def _row_adagrad(draw: _Draw) -> Call:
    args, damages = _updates(draw)
    return Call("row_adagrad_", ops.row_adagrad_, args, [], damages, in_place=("weight", "square"))


def _unique_rows(draw: _Draw) -> Call:
    pieces, rows = draw.choose.randint(1, 3), draw.choose.choice((1, 7, 64, 65, 1000))
    ids = [draw.integers(rows, draw.count()) for _ in range(pieces)]
    args: dict[str, Any] = {"ids": ids, "num_rows": rows}
    if draw.chance(0.4):
        args["bases"] = [(number * rows, rows) for number in range(pieces)]
        args["num_rows"] = pieces * rows
    damages: list[tuple[str, Damage]] = []
    filled = [number for number, tensor in enumerate(ids) if tensor.numel()]
    if filled:
        at = draw.choose.choice(filled)
        wrong = draw.choose.choice((-1, rows * pieces, -(2**63), 2**63 - 1, 2**40))

        def change(tensors: list[Tensor]) -> list[Tensor]:
            tensors = [tensor.long().clone() for tensor in tensors]
            tensors[at][0] = wrong
            return tensors

        damages.append((f"ids hold {wrong}", _replace("ids", change)))
    if "bases" in args:
        damages.append(("a table lies outside", _replace("num_rows", lambda count: count - 1)))
    return Call("unique_rows", ops.unique_rows, args, [], damages)


def _random_integers(draw: _Draw) -> Call:
    args = {
        "keys": draw.keys(draw.count()),
        "seed": draw.choose.getrandbits(63),
        "num_columns": draw.choose.randint(0, 20),
        "bound": draw.choose.choice((1, 2, 1000, 2**31 - 1)),
    }
    damages = [
        ("bound is 0", _replace("bound", lambda _: 0)),
        ("bound is too large", _replace("bound", lambda _: 2**31)),
        ("num_columns is negative", _replace("num_columns", lambda _: -1)),
        ("keys are int32", _replace("keys", lambda keys: keys.int())),
    ]
    return Call("random_integers", ops.random_integers, args, [], damages)


OPERATORS: dict[str, Callable[[_Draw], Call]] = {
    "hstu_attention": _hstu_attention,
    "fuxi_attention": _fuxi_attention,
    "fuxi_seconds_attention": _fuxi_seconds_attention,
    "softmax_attention": _softmax_attention,
    "retention": _retention,
    "periodic_attention": _periodic_attention,
    "norm_linear": _norm_linear,
    "gated_linear": _gated_linear,
    "gated_mlp": _gated_mlp,
    "embed": _embed,
    "keyed_dropout": _keyed_dropout,
    "look_up_rows": _look_up_rows,
    "sampled_softmax": _sampled_softmax,
    "sampled_logits": _sampled_logits,
    "full_softmax": _full_softmax,
    "row_adam_": _row_adam,
    "row_adagrad_": _row_adagrad,
    "unique_rows": _unique_rows,
    "random_integers": _random_integers,
}
"""By name, in the order of the calls; a test compares them with the registered operators."""

_generator = torch.Generator().manual_seed(0)
_POOL = torch.randn(_POOL_SIZE * 2, generator=_generator)
_WORDS = torch.randint(0, 2**62, (_POOL_SIZE * 2,), generator=_generator)
