"""Jagged embedding against padded nn.Embedding with a sparse optimiser, and against FBGEMM's CPU table if it is there.

The paper's case: 1,064,960 ids of which 537,019 are padding. Forward is the look-up; backward takes the gradient of
what was looked up to the updated table (Adagrad), duplicates summed first. Ids follow a Zipf law over the table.
`pip install fbgemm-gpu-cpu==1.8.0` adds the second comparison.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from turbogr.bench.record import Cell, Result, Table
from turbogr.ops import embed, row_adagrad_, unique_rows
from turbogr.report.charts import Axis, grouped_bar_chart

SETTINGS: dict[str, Any] = {
    "num_ids": 1_064_960,
    "num_padding": 537_019,
    "max_len": 2048,
    "num_rows": 1_000_000,
    "width": 128,
    "repeats": 5,
}

_LR, _EPS = 0.01, 1e-8


class Timing(NamedTuple):
    """Seconds of the fastest forward and of the fastest backward with update."""

    forward: float
    backward: float


def run(settings: Mapping[str, Any]) -> Result:
    """Time the three; figures are `forward_speedup`, `backward_speedup` and, with FBGEMM, `*_vs_fbgemm`."""
    ids, padded = make_ids(settings)
    torch.manual_seed(0)
    table = torch.randn(settings["num_rows"] + 1, settings["width"])
    repeats = settings["repeats"]
    timings = {
        "padded nn.Embedding": _time_padded(table.clone(), padded, repeats),
        "ours": _time_ours(table.clone(), ids, repeats),
    }
    ours = timings["ours"]
    figures = {
        "forward_speedup": timings["padded nn.Embedding"].forward / ours.forward,
        "backward_speedup": timings["padded nn.Embedding"].backward / ours.backward,
    }
    notes = []
    try:
        fbgemm = _time_fbgemm(table.clone(), ids, repeats)
    except ImportError as error:
        notes.append(f"FBGEMM was not compared: {error}; pip install fbgemm-gpu-cpu==1.8.0 adds it")
    else:
        timings["FBGEMM"] = fbgemm
        figures["forward_vs_fbgemm"] = fbgemm.forward / ours.forward
        figures["backward_vs_fbgemm"] = fbgemm.backward / ours.backward
    rows: list[list[Cell]] = [[name, 1e3 * t.forward, 1e3 * t.backward] for name, t in timings.items()]
    title = f"{settings['num_ids']:,} ids, {settings['num_padding']:,} of them padding, width {settings['width']}"
    plot = grouped_bar_chart(
        ["forward", "backward and update"],
        {name: [1e3 * t.forward, 1e3 * t.backward] for name, t in timings.items()},
        title=title,
        y=Axis("milliseconds", log=True),
    )
    table_of_times = Table(title, ["embedding", "forward ms", "backward and update ms"], rows)
    return Result(figures, [table_of_times], {"embedding": plot}, notes)


def make_ids(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Real ids [num_ids - num_padding], from 1, and the same ids padded with 0 to [num_ids / max_len, max_len]."""
    random = torch.Generator().manual_seed(0)
    num_real, num_rows = settings["num_ids"] - settings["num_padding"], settings["num_rows"]
    # Inverse of the distribution function of a Zipf law with exponent 1.
    rank = torch.exp(torch.rand(num_real, generator=random, dtype=torch.float64) * math.log(num_rows))
    shuffled = torch.randperm(num_rows, generator=random) + 1
    ids = shuffled[rank.long().clamp(max=num_rows) - 1]
    num_sequences = settings["num_ids"] // settings["max_len"]
    lengths = torch.full((num_sequences,), num_real // num_sequences)
    lengths[: num_real - int(lengths.sum())] += 1
    padded = torch.zeros(num_sequences, settings["max_len"], dtype=torch.int64)
    padded[torch.arange(settings["max_len"])[None, :] < lengths[:, None]] = ids
    return ids, padded


def _time_padded(table: Tensor, padded: Tensor, repeats: int) -> Timing:
    embedding = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=0, sparse=True)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=_LR, eps=_EPS)
    grad = torch.randn(*padded.shape, table.shape[1])

    def backward(out: Tensor) -> None:
        optimizer.zero_grad()
        out.backward(grad)
        optimizer.step()

    return _time(lambda: embedding(padded), backward, repeats)


def _time_ours(table: Tensor, ids: Tensor, repeats: int) -> Timing:
    square = torch.zeros_like(table)
    grad = torch.randn(ids.numel(), table.shape[1])
    nowhere = torch.zeros(1, table.shape[1])
    first = torch.zeros_like(ids)

    def backward(out: Tensor) -> None:
        distinct, index = unique_rows(ids, table.shape[0])
        grad_rows, _ = torch.ops.turbogr.embed_backward(grad, index, first, None, distinct.numel(), 1, 1.0, 0.0, 0)
        row_adagrad_(table, square, distinct, grad_rows, lr=_LR, eps=_EPS)

    return _time(lambda: embed(table, ids, nowhere, first, scale=1.0), backward, repeats)


def _time_fbgemm(table: Tensor, ids: Tensor, repeats: int) -> Timing:
    config = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    embedding = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(table.shape[0], table.shape[1], common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)],
        optimizer=config.EmbOptimType.EXACT_ADAGRAD,
        learning_rate=_LR,
        eps=_EPS,
        pooling_mode=common.PoolingMode.NONE,
    )
    embedding.split_embedding_weights()[0].copy_(table)
    offsets = torch.tensor([0, ids.numel()])
    grad = torch.randn(ids.numel(), table.shape[1])
    return _time(lambda: embedding(ids, offsets), lambda out: out.backward(grad), repeats)


def _time(forward: Callable[[], Tensor], backward: Callable[[Tensor], None], repeats: int) -> Timing:
    best = [math.inf, math.inf]
    for _ in range(repeats + 1):  # the first round warms up: optimisers make their state in it
        start = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        backward(out)
        end = time.perf_counter()
        best = [min(best[0], middle - start), min(best[1], end - middle)]
    return Timing(*best)
