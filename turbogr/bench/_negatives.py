"""Measure one implementation of the loss, in its own process so that its peak memory can be read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr import ops
from turbogr.bench._children import in_child
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.config import LossConfig, ModelConfig
from turbogr.data.batching import Batch
from turbogr.models import RetrievalModel
from turbogr.negatives import LossContext
from turbogr.negatives.sampled_softmax_loss import SampledSoftmaxLoss
from turbogr.ops.sampled_softmax import Precision
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import fetch_rows
from turbogr.training.cost_measurement import made_up_batch

PLAIN = "plain gather"
MODEL = "model"
_DRAWN = 64
_SEGMENT_MB = 16.0


class Case(NamedTuple):
    """`way`: one of `WAYS`, `PLAIN`, or `MODEL` (the rest of the step). `num_negatives`: effective negatives."""

    way: str
    num_negatives: int
    length: int
    num_tokens: int
    num_items: int
    dim: int
    repeats: int
    threads: int


class Measured(NamedTuple):
    """Seconds of the fastest forward and backward, and peak memory above the inputs."""

    seconds: float
    peak_bytes: int


def shared(num_negatives: int) -> dict[str, int]:
    """Return options for `num_negatives` effective negatives: 64 drawn per position (half if few), the rest shared."""
    expansion = max(2, num_negatives // _DRAWN)
    return {"num_negatives": num_negatives // expansion, "expansion": expansion}


WAYS: dict[str, Callable[[int], LossConfig]] = {
    "fused": lambda n: LossConfig(num_negatives=n),
    "fp16": lambda n: LossConfig(num_negatives=n, precision="fp16"),
    "int8": lambda n: LossConfig(num_negatives=n, precision="int8"),
    "segments": lambda n: LossConfig(num_negatives=n, segment_mb=_SEGMENT_MB),
    "shared": lambda n: LossConfig(**shared(n)),  # type: ignore[arg-type]
    "all together": lambda n: LossConfig(precision="fp16", segment_mb=_SEGMENT_MB, **shared(n)),  # type: ignore[arg-type]
}


def measure_in_child(case: Case) -> Measured:
    """Measure a case in a new process, forked from one that has only imported this module."""
    return in_child(measure, case, "forkserver")


class Rounding(NamedTuple):
    """Seconds and bytes that fp16 negatives add to a step: rounded in the kernel, or read from an fp16 copy."""

    kernel_seconds: float
    kernel_bytes: int
    shadow_seconds: float
    shadow_bytes: int


def measure_rounding_in_child(case: Case) -> Rounding:
    """Measure what fp16 negatives add to a step of a case, in a new process."""
    return in_child(measure_rounding, case, "forkserver")


def measure_rounding(case: Case) -> Rounding:
    """Compare rounding in the kernel with gathering from an fp16 copy of the table that is updated after the step.

    The kernel scales and rounds every row it gets, so on a single position the forward in fp16 takes longer than in
    fp32 by exactly that time. The rows of a copy must be rounded too, at the same cost, and are also written to it and
    gathered from it. Both need the fp32 rows as well, for targets and gradients.
    """
    torch.set_num_threads(case.threads)
    batch = made_up_batch(torch.full((max(1, case.num_tokens // case.length),), case.length).numpy(), case.num_items)
    table = LocalTable(case.num_items, case.dim)
    table.draw(0, case.num_items, 0)
    drawn = _loss(LossConfig(num_negatives=case.num_negatives), case).draw(batch, 0)
    fetched = fetch_rows(table, [batch.items.values, drawn])
    rows, shadow = fetched.rows.detach(), unit(table.weight).half()
    rounded = shadow.index_select(0, fetched.ids)

    def score(precision: Precision) -> Tensor:
        one = torch.zeros(1, dtype=torch.int32)
        return ops.sampled_softmax(rows[:1], rows, one, one[:, None], temperature=0.05, precision=precision)

    def update_and_gather() -> Tensor:
        shadow.index_copy_(0, fetched.ids, rounded)
        return shadow.index_select(0, fetched.ids)

    works: list[Callable[[], Tensor]] = [lambda: score("fp32"), lambda: score("fp16"), update_and_gather]
    fp32, fp16, copying = _fastest(works, 3 * case.repeats)
    rounding = max(0.0, fp16 - fp32)
    copied = rows.numel() * shadow.element_size()
    return Rounding(rounding, copied, rounding + copying, copied + shadow.nbytes)


def _fastest(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the seconds of the fastest run of each, run in turn, after a warm-up."""
    best = [math.inf] * len(works)
    for number in range(repeats + 1):
        for index, work in enumerate(works):
            started = time.perf_counter()
            work()
            if number:
                best[index] = min(best[index], time.perf_counter() - started)
    return best


def measure(case: Case) -> Measured:
    """Run forward and backward `repeats` times, after a warm-up on a few positions."""
    torch.set_num_threads(case.threads)
    ops.keep_freed_memory()
    run = prepare(case)
    prepare(case._replace(num_tokens=16, length=16, num_items=64))()  # libraries initialise here
    before = _resident_bytes("VmRSS")
    _reset_peak()
    best = math.inf
    for _ in range(case.repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return Measured(best, max(1, _resident_bytes("VmHWM") - before))


def prepare(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """Return the measured function: from ids to the gradients of queries and rows (or of the model)."""
    count = max(1, case.num_tokens // case.length)
    batch = made_up_batch(torch.full((count,), case.length).numpy(), case.num_items)
    table = LocalTable(case.num_items, case.dim)
    table.draw(0, case.num_items, 0)
    queries = torch.randn(batch.num_tokens, case.dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if case.way == MODEL:
        return _model(case, batch, table)
    if case.way == PLAIN:
        negatives = _loss(LossConfig(num_negatives=case.num_negatives), case).draw(batch, 0).long()
        return lambda: plain_loss(queries, table.weight.requires_grad_(), batch, negatives)
    objective = _loss(WAYS[case.way](case.num_negatives), case)
    drawn = objective.draw(batch, 0)
    return lambda: our_loss(objective, queries, table, batch, drawn)


def _loss(config: LossConfig, case: Case) -> SampledSoftmaxLoss:
    return SampledSoftmaxLoss(config, None, LossContext(case.num_items, seed=0))


def plain_loss(queries: Tensor, weight: Tensor, batch: Batch, negatives: Tensor) -> tuple[Tensor, ...]:
    """Compute the loss as the public code does: the vectors of all negatives in one tensor, one pass per operation."""
    assert batch.targets is not None
    candidates = torch.cat([batch.targets[:, None], negatives], dim=1)
    vectors = F.normalize(F.embedding(candidates, weight, sparse=True), dim=-1, eps=1e-6)
    logits = (F.normalize(queries, dim=-1, eps=1e-6)[:, None, :] * vectors).sum(-1) / 0.05
    hits = negatives == batch.targets[:, None]
    logits = torch.cat([logits[:, :1], logits[:, 1:].masked_fill(hits, -5e4)], dim=1)
    loss = -F.log_softmax(logits, dim=1)[:, 0]
    return loss.detach(), *torch.autograd.grad(loss.sum(), [queries, weight])


def our_loss(
    objective: SampledSoftmaxLoss, queries: Tensor, table: LocalTable, batch: Batch, drawn: Tensor
) -> tuple[Tensor, ...]:
    """Fetch the distinct rows and compute the gradients of the loss."""
    assert batch.targets is not None
    fetched = fetch_rows(table, [batch.targets, drawn])
    positives, negatives = fetched.index[: batch.num_tokens], fetched.index[batch.num_tokens :].view(drawn.shape)
    loss = objective.loss(queries, fetched.rows, positives, negatives, fetched.ids, batch, 0)
    return loss.detach(), *torch.autograd.grad(loss.sum(), [queries, fetched.rows]), fetched.ids


def _model(case: Case, batch: Batch, table: LocalTable) -> Callable[[], tuple[Tensor, ...]]:
    config = ModelConfig(dim=case.dim, num_blocks=2, num_heads=max(1, case.dim // 32), max_len=case.length)
    model = RetrievalModel(config)
    model.reset_parameters(torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, ...]:
        fetched = fetch_rows(table, [batch.items.values])
        outputs = model.encode(fetched.rows, fetched.index, batch, seed=0)
        return torch.autograd.grad(outputs.sum(), [*model.parameters(), fetched.rows])

    return run
