"""Table 7 of the paper: peak memory of whole training steps, negatives in segments against all of them gathered.

Run as a process of its own for each case (`in_child`): one step of FuXi-large at the paper's batch size, optimisers
included, and the largest resident memory of the whole process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr import ops
from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench._paper_models import paper_model
from turbogr.bench._paper_rows import BATCH_SIZES, FILL, Part, Row, filled_lengths
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.bench.record import Cell, Table
from turbogr.config import PRESETS, Config, LossConfig, ModelConfig, OptimizerConfig, resolve
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.cost_measurement import made_up_batch
from turbogr.training.step import Stepper

_NUM_ITEMS = 20_000  # the table is the same on both sides; a large one would hide the difference
_SEGMENT_MB = 64.0
_PAPER = {32: (22.21, 17.42), 64: (31.64, 23.44), 128: (50.39, 34.27)}  # GB of a device, without and with


class Case(NamedTuple):
    """`way`: "gathered" (one tensor of all negatives' vectors), "fused" or "segments"."""

    way: str
    num_negatives: int
    preset: str
    num_sequences: int


def table7(settings: Mapping[str, Any], part: Part) -> None:
    """Compare the ways at 32, 64 and 128 negatives."""
    rows: list[list[Cell]] = []
    for count in _PAPER:
        found = {}
        for way in ("gathered", "fused", "segments"):
            case = Case(way, count, "fuxi_large", BATCH_SIZES["large"])
            found[way] = measured(f"{way}, {count} negatives", partial(in_child, measure, case))
        gathered, fused, segments = (found[way][1] for way in found)
        before, after = _PAPER[count]
        part.add(
            Row(f"table7_saving_{count}", f"Peak memory that offloading saves, {count} negatives", 1 - after / before,
                f"FuXi-large on one device of 64 GB: {before} → {after} GB", 1 - segments / gathered,
                f"FuXi-large, 2 sequences, {100 * FILL:.1f} % full, whole process with optimisers; segments of "
                f"{_SEGMENT_MB:g} MB against a gathered [T, {count}, {PRESETS['large']['dim']}] in plain PyTorch; the "
                f"table has {_NUM_ITEMS:,} items on both sides", "higher", "measured", ("sections=table7",))
        )  # fmt: skip
        part.figures[f"table7_saving_fused_{count}"] = 1 - fused / gathered
        part.figures[f"table7_segments_time_ratio_{count}"] = found["segments"][0] / found["fused"][0]
        rows += [[count, way, value[0], value[1] / 2**30] for way, value in found.items()]
    columns = ["negatives", "way", "seconds of the loss", "peak GiB of the process"]
    part.tables.append(Table("FuXi-large, one step", columns, rows))


def measure(case: Case) -> tuple[float, float]:
    """Return the seconds of the loss's forward and of its backward to the model's outputs, and the peak in bytes."""
    ops.keep_freed_memory()
    name, preset = paper_model(case.preset)
    segments = _SEGMENT_MB if case.way == "segments" else None
    config = Config(
        model=ModelConfig(name=name, preset=preset, dropout=0.5),  # type: ignore[arg-type]
        loss=LossConfig(num_negatives=case.num_negatives, segment_mb=segments),
        optimizer=OptimizerConfig(table="adagrad"),
    )
    sizes: dict[str, Any] = {"num_sequences": 2**20, "typical_length": 1, "longest_length": 2**31}
    stepper = Stepper(resolve(config, num_items=_NUM_ITEMS, **sizes), _NUM_ITEMS, device=torch.device("cpu"),
                      mesh=Mesh(World()))  # fmt: skip
    batch = made_up_batch(filled_lengths(case.num_sequences, PRESETS[preset]["max_len"]), _NUM_ITEMS)
    batch = stepper.prepare(batch, 0)
    objective = stepper.task.objective  # type: ignore[attr-defined]
    seconds = [0.0]
    inner = _gathered if case.way == "gathered" else objective.loss

    def timed(outputs: Tensor, rows: Tensor, *rest: Any) -> Tensor:
        started = time.perf_counter()
        leaf = outputs.detach().requires_grad_()
        loss = inner(leaf, rows, *rest)
        # The backward of the loss runs here, where it can be timed; the model's follows from the gradient of `leaf`.
        grad_outputs, grad_rows = torch.autograd.grad(loss.sum(), [leaf, rows])
        seconds[0] = time.perf_counter() - started
        return _with_gradients(outputs, rows, loss.detach(), grad_outputs, grad_rows)

    objective.loss = timed
    _reset_peak()
    sets = stepper.fetch(batch)
    loss = stepper.compute(batch, sets, 0)
    reduced = stepper.reduce(sets)
    stepper.update(reduced, stepper.measure(loss, reduced).grad_norm, 1.0)
    return seconds[0], float(_resident_bytes("VmHWM"))


def _gathered(outputs: Tensor, rows: Tensor, positives: Tensor, negatives: Tensor, *rest: Any) -> Tensor:
    """The loss with the vectors of all negatives in one tensor [T, R, d], one pass per operation."""
    chosen = torch.cat([positives[:, None], negatives], dim=1).long()
    vectors = F.normalize(F.embedding(chosen, rows), dim=-1, eps=1e-6)
    logits = (F.normalize(outputs, dim=-1, eps=1e-6)[:, None, :] * vectors).sum(-1) / 0.05
    hits = chosen[:, 1:] == chosen[:, :1]
    logits = torch.cat([logits[:, :1], logits[:, 1:].masked_fill(hits, -5e4)], dim=1)
    return -F.log_softmax(logits, dim=1)[:, 0]


class _Given(torch.autograd.Function):
    """A loss whose gradients are known already, for the mean that follows."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, rows: Tensor, loss: Tensor, grad_outputs: Tensor, grad_rows: Tensor
    ) -> Tensor:
        ctx.grads = grad_outputs, grad_rows
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scale = grad.flatten()[0]  # of a mean or a sum: the same for every position
        grad_outputs, grad_rows = ctx.grads
        del ctx.grads
        return grad_outputs.mul_(scale), grad_rows.mul_(scale), None, None, None


def _with_gradients(outputs: Tensor, rows: Tensor, loss: Tensor, grad_outputs: Tensor, grad_rows: Tensor) -> Tensor:
    given: Tensor = _Given.apply(outputs, rows, loss, grad_outputs, grad_rows)  # type: ignore[no-untyped-call]
    return given
