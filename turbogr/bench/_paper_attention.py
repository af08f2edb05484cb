"""Figure 2 of the paper: training steps of FuXi-long with fused attention, against padded attention in plain PyTorch.

Both sides are whole steps of the same model. The other side uses our reference operators, plain PyTorch on jagged
tokens, and pads the attention as the public code does, with position weights by padding and reshaping one vector.
Sixteen padded blocks do not fit into a small machine's memory, so two numbers of blocks are measured, and a straight
line through them says what sixteen would take.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr import ops
from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench._padded import pad
from turbogr.bench._paper_models import paper_model
from turbogr.bench._paper_rows import FILL, Part, Row
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.bench.record import Cell, Table
from turbogr.config import Config, LossConfig, ModelConfig, OptimizerConfig, resolve
from turbogr.layers import fuxi
from turbogr.ops.jagged_attention.reference import DECAY_UNIT
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.cost_measurement import made_up_batch
from turbogr.training.step import Stepper

_NUM_ITEMS, _NUM_NEGATIVES, _BLOCKS = 20_000, 32, 16


class Case(NamedTuple):
    """One sequence, `FILL` of `length` long, through a model of the paper with some of its blocks."""

    padded: bool
    length: int
    num_blocks: int
    steps: int
    threads: int
    preset: str = "fuxi_long"


def figure2(settings: Mapping[str, Any], part: Part) -> None:
    """Measure both sides at two numbers of blocks and extend them to sixteen."""
    length, blocks, steps = (2048, (1, 2), 2) if settings["quick"] else (8192, (2, 4), 2)
    rows: list[list[Cell]] = []
    whole = {}
    for name, padded in (("padded PyTorch", True), ("fused", False)):
        found = []
        for number in blocks:
            case = Case(padded, length, number, steps, torch.get_num_threads())
            found.append(measured(f"{name}, {number} blocks, length {length}", partial(in_child, measure, case)))
            rows.append([name, number, found[-1][0], found[-1][1] / 2**30, "measured"])
        few, many = np.array(found)
        per_block = (many - few) / (blocks[1] - blocks[0])
        whole[name] = few + per_block * (_BLOCKS - blocks[0])
        rows.append([name, _BLOCKS, float(whole[name][0]), float(whole[name][1] / 2**30), "extrapolated"])
    part.tables.append(
        Table(f"FuXi-long, one sequence of {int(FILL * length):,} padded to {length:,}",
              ["side", "blocks", "seconds per step", "peak GiB of the process", ""], rows)
    )  # fmt: skip
    conditions = (
        f"whole training step, one sequence {100 * FILL:.1f} % of {length:,} long, {blocks[0]} and {blocks[1]} blocks "
        f"measured, extrapolated to {_BLOCKS}; against our reference operators with padded attention"
    )
    paper = "FuXi-long at length 8192 on one NPU: 961.21 → 431.13 ms, 47.77 → 14.31 GB reserved"
    theirs, ours = whole["padded PyTorch"], whole["fused"]
    part.add(
        Row("figure2_speedup", "FuXi-long, a step with fused attention: times as fast", 961.21 / 431.13, paper,
            float(theirs[0] / ours[0]), conditions, "higher", "measured", ("sections=figure2",))
    )  # fmt: skip
    part.add(
        Row("figure2_memory_saving", "FuXi-long, peak memory saved by fused attention", 1 - 14.31 / 47.77, paper,
            float(1 - ours[1] / theirs[1]), conditions, "higher", "measured", ("sections=figure2",))
    )  # fmt: skip


def measure(case: Case) -> tuple[float, float]:
    """Return the seconds of the fastest step after the first, and the peak memory of the process in bytes."""
    torch.set_num_threads(case.threads)
    ops.keep_freed_memory()
    ops.set_backend("reference" if case.padded else "auto")
    name, preset = paper_model(case.preset)
    model = ModelConfig(name=name, preset=preset, num_blocks=case.num_blocks, max_len=case.length, dropout=0.5)  # type: ignore[arg-type]
    loss = LossConfig(num_negatives=_NUM_NEGATIVES)
    sizes: dict[str, Any] = {"num_sequences": 2**20, "typical_length": 1, "longest_length": 2**31}
    config = resolve(
        Config(model=model, loss=loss, optimizer=OptimizerConfig(table="adagrad")), num_items=_NUM_ITEMS, **sizes
    )
    stepper = Stepper(config, _NUM_ITEMS, device=torch.device("cpu"), mesh=Mesh(World()))
    batch = made_up_batch(np.array([int(FILL * case.length)]), _NUM_ITEMS)
    attention: AbstractContextManager[object] = nullcontext()
    if case.padded:
        attention = mock.patch.object(fuxi, "fuxi_attention", padded_fuxi_attention)
    best = float("inf")
    with attention:
        for number in range(case.steps):
            if number == 1:
                _reset_peak()
            prepared = stepper.prepare(batch, number)
            started = time.perf_counter()
            sets = stepper.fetch(prepared)
            step_loss = stepper.compute(prepared, sets, number)
            rows = stepper.reduce(sets)
            stepper.update(rows, stepper.measure(step_loss, rows).grad_norm, 1.0)
            if number or case.steps == 1:
                best = min(best, time.perf_counter() - started)
            del sets, rows, step_loss, prepared
    return best, float(_resident_bytes("VmHWM"))


def padded_fuxi_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Any, *, max_len: int, visible: object = None
) -> Tensor:
    """Return FuXi's attention of jagged [T, h, d], its channels computed on padded [B, max_len, ...] in plain PyTorch.

    `bias` is the operator's `DecayBias`.
    """
    filled = torch.arange(max_len)[None, :] < offsets.diff()[:, None]
    q_bnhd, k_bnhd, v_bnhe = (pad(x, filled) for x in (q, k, v))
    # Row i of a matrix of relative positions is the vector shifted by i: pad it, repeat it, reshape.
    n = max_len
    repeated = F.pad(bias.position_weight[: 2 * n - 1], (0, n)).repeat(n)
    position = repeated[: n * (3 * n - 2)].view(n, 3 * n - 2)[:, n - 1 : 2 * n - 1]
    seconds = 1 + (pad(bias.query_times, filled)[:, :, None] - pad(bias.key_times, filled)[:, None, :]).abs()
    amplitude, exponent, base = bias.decay.unbind()
    log_days = torch.log(seconds.to(v.dtype) / DECAY_UNIT)
    decay = amplitude * torch.exp(torch.log(base) * torch.exp(exponent * log_days))
    causal = torch.ones(n, n).tril()
    content = F.silu(torch.einsum("bnhd,bmhd->bhnm", q_bnhd, k_bnhd)) / n
    channels = [
        torch.einsum("nm,bmhe->bnhe", position * causal, v_bnhe),
        torch.einsum("bnm,bmhe->bnhe", decay * causal, v_bnhe),
        torch.einsum("bhnm,bmhe->bnhe", content * causal, v_bnhe),
    ]
    return torch.cat(channels, dim=3)[filled]
