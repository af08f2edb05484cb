"""Fused jagged attention against padded PyTorch: time and memory of forward and backward, and share of the peak.

Claim: faster than padded attention, in less memory, at every length.
Compared with: padded attention in plain PyTorch, as Meta's research code computes it.
Keys: `speedup_N` and `memory_saving_N` at maximum length N; at head width D, `peak_share_D`: FLOP/s ÷ what the
processor computes at most by fused multiply-adds, and `gemm_share_D`: FLOP/s ÷ PyTorch's matrix product.

Lengths are lognormal with the spread of KuaiRand-27K (mean 11,796, median 8,591) and fill half of the padded batch, as
in the paper; one sequence has the full length. Each measurement runs in its own process, so that its peak memory can be
read; memory is counted above that of the inputs. The shares count only real tokens and the causal half, no
recomputation, and three times the forward for forward and backward. Position and time bias are both on.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench._padded import padded_hstu_attention
from turbogr.bench.record import Cell, Result, Table
from turbogr.machine import gemm_peak
from turbogr.ops import RelativeBias, hstu_attention
from turbogr.peak import fma_peak
from turbogr.plot import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "lengths": [200, 2048, 8192],
    "tokens": 16384,  # of the padded batch; a larger length means fewer sequences
    "heads": 2,
    "head_dim": 64,
    "share_head_dims": [64, 128],
    "share_length": 2048,
    "fill": 0.5,
    "repeats": 5,
    "threads": 0,  # 0: as many as torch uses
}

_SPREAD = math.sqrt(2 * math.log(11_796 / 8_591))


class Case(NamedTuple):
    """One batch: `num_sequences` sequences of up to `length` tokens."""

    length: int
    num_sequences: int
    heads: int
    head_dim: int
    fill: float
    repeats: int
    threads: int


class Measured(NamedTuple):
    """Seconds of the fastest forward and backward, and peak memory above the inputs."""

    seconds: float
    peak_bytes: int


def run(settings: Mapping[str, Any]) -> Result:
    """Compare both at each of `lengths`, then measure the share of the peak."""
    threads = settings["threads"] or torch.get_num_threads()
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    for length in settings["lengths"]:
        count = max(2, settings["tokens"] // length)
        case = Case(
            length, count, settings["heads"], settings["head_dim"], settings["fill"], settings["repeats"], threads
        )
        padded = Measured(*measured(f"padded, length {length}", partial(in_child, _measure_padded, case)))
        fused = Measured(*measured(f"fused, length {length}", partial(in_child, _measure_fused, case)))
        figures[f"speedup_{length}"] = padded.seconds / fused.seconds
        figures[f"memory_saving_{length}"] = 1 - fused.peak_bytes / max(1, padded.peak_bytes)
        rows.append(
            [
                length,
                count,
                padded.seconds * 1e3,
                fused.seconds * 1e3,
                figures[f"speedup_{length}"],
                padded.peak_bytes / 2**20,
                fused.peak_bytes / 2**20,
                figures[f"memory_saving_{length}"],
            ]
        )
    shares = _shares(settings, threads, figures)
    columns = ["length", "sequences", "padded ms", "fused ms", "speed-up", "padded MiB", "fused MiB", "saving"]
    lengths = [str(length) for length in settings["lengths"]]
    plot = grouped_bar_chart(
        lengths,
        {"padded PyTorch": [float(row[2] or 0) for row in rows], "fused": [float(row[3] or 0) for row in rows]},
        title="Forward and backward of HSTU attention",
        x_label="maximum length",
        y=Axis("milliseconds", log=True),
    )
    title = f"HSTU attention, {settings['heads']} heads of {settings['head_dim']}, {threads} threads"
    return Result(figures, [Table(title, columns, rows), shares], {"attention": plot})


def _shares(settings: Mapping[str, Any], threads: int, figures: dict[str, float]) -> Table:
    gemm = measured("GEMM peak", lambda: gemm_peak(torch.float32, threads))
    peak = measured("peak", lambda: fma_peak(torch.float32, threads))
    rows: list[list[Cell]] = []
    for head_dim in settings["share_head_dims"]:
        length = settings["share_length"]
        count = max(2, settings["tokens"] // length)
        case = Case(length, count, settings["heads"], head_dim, settings["fill"], settings["repeats"], threads)
        fused = Measured(*measured(f"fused, heads of {head_dim}", partial(in_child, _measure_fused, case)))
        rate = 3 * forward_flops(case) / fused.seconds
        figures[f"peak_share_{head_dim}"] = rate / peak
        figures[f"gemm_share_{head_dim}"] = rate / gemm
        rows.append([head_dim, rate / 1e9, peak / 1e9, rate / peak, gemm / 1e9, rate / gemm])
    return Table(
        f"Share of the peak at length {settings['share_length']}",
        ["head", "GFLOP/s", "peak", "share", "matrix product", "share of it"],
        rows,
    )


def forward_flops(case: Case) -> float:
    """Return the FLOPs of a forward, counting only real tokens and the causal half."""
    return sum(2 * n * (n + 1) / 2 * case.heads * 2 * case.head_dim for n in make_lengths(case))


def make_lengths(case: Case) -> list[int]:
    """Return the lengths of the batch: one full, the others lognormal, filling about `fill` of the padded batch."""
    random = torch.Generator().manual_seed(0)
    raw = torch.exp(_SPREAD * torch.randn(case.num_sequences - 1, generator=random, dtype=torch.float64))
    target = max(1.0, case.fill * case.length * case.num_sequences - case.length)
    low, high = 0.0, case.length / float(raw.min())
    for _ in range(60):  # bisect for the scale at which the clipped lengths add up to the target
        middle = (low + high) / 2
        low, high = (middle, high) if float((raw * middle).clamp(1, case.length).sum()) < target else (low, middle)
    return [case.length, *(raw * high).clamp(1, case.length).long().tolist()]


def _measure_padded(case: Case) -> Measured:
    return _measure(case, padded_hstu_attention)


def _measure_fused(case: Case) -> Measured:
    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *bias: Any) -> Tensor:
        *tensors, max_len = bias
        return hstu_attention(q, k, v, offsets, RelativeBias(*tensors), max_len=max_len)

    return _measure(case, attend)


def _measure(case: Case, attend: Callable[..., Tensor]) -> Measured:
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    lengths = make_lengths(case)
    num_tokens = sum(lengths)
    q, k, v = (torch.randn(num_tokens, case.heads, case.head_dim).requires_grad_() for _ in range(3))
    times = torch.cat([torch.randint(0, 30 * 86_400, (n,)).sort()[0] for n in lengths])
    weights = [(0.02 * torch.randn(n)).requires_grad_() for n in (2 * case.length - 1, 33)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    grad = torch.randn(num_tokens, case.heads, case.head_dim)
    torch.mm(grad[:64, 0], grad[:64, 0].t())  # libraries initialise here, not in the measurement
    before = resident_bytes()
    best = math.inf
    for _ in range(case.repeats):
        start = time.perf_counter()
        out = attend(q, k, v, offsets, times.roll(-1), times, *weights, case.length)
        torch.autograd.grad(out, [q, k, v, *weights], grad)
        best = min(best, time.perf_counter() - start)
        del out
    return Measured(best, max(1, peak_bytes() - before))


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
