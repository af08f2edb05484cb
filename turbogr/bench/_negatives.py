"""One measured loss, in a process of its own so that its peak of memory is its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr import ops
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.config import LossConfig, ModelConfig
from turbogr.data.batching import Batch
from turbogr.layers.item_table import ItemTable
from turbogr.models import RetrievalModel
from turbogr.negatives import Objective
from turbogr.ops.sampled_softmax import Precision
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.train.calibration import made_up_batch

PLAIN = "plain gather"
MODEL = "model"
_DRAWN = 64
_SEGMENT_MB = 16.0


class Case(NamedTuple):
    """`way` is one of `WAYS`, `PLAIN` or, the rest of the step, `MODEL`; `num_negatives` are those that count."""

    way: str
    num_negatives: int
    length: int
    num_tokens: int
    num_items: int
    dim: int
    repeats: int
    threads: int


class Measured(NamedTuple):
    """Seconds of the fastest forward and backward, and the peak of memory above the inputs."""

    seconds: float
    peak_bytes: int


def shared(num_negatives: int) -> dict[str, int]:
    """64 negatives drawn for a position and as many shared as are wanted, or half of few."""
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
    """Measure a case in a fresh process, forked from one that has imported this module and done nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, case).result()


class Rounding(NamedTuple):
    """What fp16 negatives add to a step, in seconds and bytes: rounded in the kernel, or read from a shadow table."""

    kernel_seconds: float
    kernel_bytes: int
    shadow_seconds: float
    shadow_bytes: int


def measure_rounding_in_child(case: Case) -> Rounding:
    """Measure what fp16 negatives add to a step of a case, in a fresh process."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_rounding, case).result()


def measure_rounding(case: Case) -> Rounding:
    """Compare the kernel's copy of a step's rows with gathering them from a shadow and updating that after the step.

    The kernel scales and rounds every row that it is given, so on a single position the forward in fp16 takes longer
    than in fp32 by just that. A shadow's rows have to be rounded too, which counts as much, and are put into it and
    gathered from it. Both ways need the fp32 rows as well, for targets and gradients.
    """
    torch.set_num_threads(case.threads)
    batch = made_up_batch(torch.full((max(1, case.num_tokens // case.length),), case.length).numpy(), case.num_items)
    table = ItemTable(case.num_items, case.dim)
    table.reset_parameters(0)
    drawn = Objective(LossConfig(num_negatives=case.num_negatives), case.num_items, 0).draw(batch, 0)
    fetched = table.fetch([batch.items.values, drawn])
    rows, shadow = fetched.rows.detach(), unit(table.weight).half()
    rounded = shadow.index_select(0, fetched.ids)

    def score(precision: Precision) -> Tensor:
        one = torch.zeros(1, dtype=torch.int32)
        return ops.sampled_softmax(rows[:1], rows, one, one[:, None], temperature=0.05, precision=precision)

    def keep_in_step() -> Tensor:
        shadow.index_copy_(0, fetched.ids, rounded)
        return shadow.index_select(0, fetched.ids)

    works: list[Callable[[], Tensor]] = [lambda: score("fp32"), lambda: score("fp16"), keep_in_step]
    fp32, fp16, moving = _fastest(works, 3 * case.repeats)
    rounding = max(0.0, fp16 - fp32)
    copied = rows.numel() * shadow.element_size()
    return Rounding(rounding, copied, rounding + moving, copied + shadow.nbytes)


def _fastest(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of the fastest run of each, in turn, after one that does not count."""
    best = [math.inf] * len(works)
    for number in range(repeats + 1):
        for place, work in enumerate(works):
            started = time.perf_counter()
            work()
            if number:
                best[place] = min(best[place], time.perf_counter() - started)
    return best


def measure(case: Case) -> Measured:
    """Run forward and backward some times, after one on a few positions."""
    torch.set_num_threads(case.threads)
    ops.keep_freed_memory()
    run = prepare(case)
    prepare(case._replace(num_tokens=16, length=16, num_items=64))()  # libraries set themselves up here
    before = _resident_bytes("VmRSS")
    _reset_peak()
    best = math.inf
    for _ in range(case.repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return Measured(best, max(1, _resident_bytes("VmHWM") - before))


def prepare(case: Case) -> Callable[[], tuple[Tensor, ...]]:
    """Return what is measured: it takes ids to the gradients of queries and rows (or of the model)."""
    count = max(1, case.num_tokens // case.length)
    batch = made_up_batch(torch.full((count,), case.length).numpy(), case.num_items)
    table = ItemTable(case.num_items, case.dim)
    table.reset_parameters(0)
    queries = torch.randn(batch.num_tokens, case.dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if case.way == MODEL:
        return _model(case, batch, table)
    if case.way == PLAIN:
        negatives = Objective(LossConfig(num_negatives=case.num_negatives), case.num_items, 0).draw(batch, 0).long()
        return lambda: plain_loss(queries, table.weight.requires_grad_(), batch, negatives)
    objective = Objective(WAYS[case.way](case.num_negatives), case.num_items, 0)
    drawn = objective.draw(batch, 0)
    return lambda: our_loss(objective, queries, table, batch, drawn)


def plain_loss(queries: Tensor, weight: Tensor, batch: Batch, negatives: Tensor) -> tuple[Tensor, ...]:
    """As the public code does: the vectors of all negatives side by side, a pass at a time."""
    assert batch.targets is not None
    candidates = torch.cat([batch.targets[:, None], negatives], dim=1)
    vectors = F.normalize(F.embedding(candidates, weight, sparse=True), dim=-1, eps=1e-6)
    logits = (F.normalize(queries, dim=-1, eps=1e-6)[:, None, :] * vectors).sum(-1) / 0.05
    hits = negatives == batch.targets[:, None]
    logits = torch.cat([logits[:, :1], logits[:, 1:].masked_fill(hits, -5e4)], dim=1)
    loss = -F.log_softmax(logits, dim=1)[:, 0]
    return loss.detach(), *torch.autograd.grad(loss.sum(), [queries, weight])


def our_loss(
    objective: Objective, queries: Tensor, table: ItemTable, batch: Batch, drawn: Tensor
) -> tuple[Tensor, ...]:
    """Fetch the distinct rows and take the loss's gradient to them."""
    assert batch.targets is not None
    fetched = table.fetch([batch.targets, drawn])
    loss = objective.loss(queries, fetched.rows, fetched.index, fetched.ids, batch, 0)
    return loss.detach(), *torch.autograd.grad(loss.sum(), [queries, fetched.rows]), fetched.ids


def _model(case: Case, batch: Batch, table: ItemTable) -> Callable[[], tuple[Tensor, ...]]:
    config = ModelConfig(dim=case.dim, num_blocks=2, num_heads=max(1, case.dim // 32), max_len=case.length)
    model = RetrievalModel(config)
    model.reset_parameters(torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, ...]:
        fetched = table.fetch(batch.items.values)
        outputs = model.encode(fetched.rows, fetched.index, batch, seed=0)
        return torch.autograd.grad(outputs.sum(), [*model.parameters(), fetched.rows])

    return run
