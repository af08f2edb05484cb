"""Measure one embedding implementation; a script that reads its name and the settings as JSON from standard input.

It is a script so that FBGEMM can be measured in an environment that has FBGEMM and not TurboGR. It prints as JSON the
seconds of the fastest forward and of the fastest backward with update. Every implementation keeps freed memory in its
process, as training with TurboGR does; otherwise the time to clear fresh pages would hide the difference.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

LR, EPS = 0.01, 1e-8

Forward = Callable[[], Any]
Backward = Callable[[Any], None]


def make_ids(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return real ids [num_ids - num_padding], from 1, and the same padded with 0 to [num_ids / max_len, max_len].

    Ids follow a Zipf law over the table; all sequences have about the same length.
    """
    random = torch.Generator().manual_seed(0)
    num_real, num_rows = settings["num_ids"] - settings["num_padding"], settings["num_rows"]
    ids = draw_zipf_ids(num_real, num_rows, random)
    num_sequences = settings["num_ids"] // settings["max_len"]
    lengths = torch.full((num_sequences,), num_real // num_sequences)
    lengths[: num_real - int(lengths.sum())] += 1
    padded = torch.zeros(num_sequences, settings["max_len"], dtype=torch.int64)
    padded[torch.arange(settings["max_len"])[None, :] < lengths[:, None]] = ids
    return ids, padded


def draw_zipf_ids(count: int, num_rows: int, random: torch.Generator) -> Tensor:
    """Draw ids [count] from 1 to num_rows by a Zipf law with exponent 1; which ids are frequent is random."""
    # Inverse of the distribution function.
    popularity = torch.exp(torch.rand(count, generator=random, dtype=torch.float64) * math.log(num_rows))
    shuffled = torch.randperm(num_rows, generator=random) + 1
    return shuffled[popularity.long().clamp(max=num_rows) - 1]


def padded_lookup(settings: Mapping[str, Any], table: Tensor, ids: Tensor, padded: Tensor) -> tuple[Forward, Backward]:
    """nn.Embedding on the padded ids, with PyTorch's Adagrad on its sparse gradient."""
    embedding = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=0, sparse=True)
    return lambda: embedding(padded), _update_sparse(embedding, torch.randn(*padded.shape, table.shape[1]))


def padded_stage(settings: Mapping[str, Any], table: Tensor, ids: Tensor, padded: Tensor) -> tuple[Forward, Backward]:
    """The input of a model as the public HSTU and SASRec code computes it, one pass after the other."""
    embedding = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=0, sparse=True)
    position = nn.Embedding(padded.shape[1], table.shape[1])
    dropout = nn.Dropout(settings["dropout"])
    scale = math.sqrt(table.shape[1])

    def forward() -> Tensor:
        positions = torch.arange(padded.shape[1]).unsqueeze(0).repeat(padded.shape[0], 1)
        x: Tensor = dropout(embedding(padded) * scale + position(positions))
        x *= (padded != 0).unsqueeze(-1).float()
        return x

    update = _update_sparse(embedding, torch.randn(*padded.shape, table.shape[1]))

    def backward(out: Tensor) -> None:
        position.zero_grad()
        update(out)

    return forward, backward


def _update_sparse(embedding: nn.Embedding, grad: Tensor) -> Callable[[Tensor], None]:
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=LR, eps=EPS)

    def update(out: Tensor) -> None:
        optimizer.zero_grad()
        out.backward(grad)  # type: ignore[no-untyped-call]
        optimizer.step()

    return update


def our_lookup(settings: Mapping[str, Any], table: Tensor, ids: Tensor, padded: Tensor) -> tuple[Forward, Backward]:
    """Our operators as a look-up alone: one position of zeros, a scale of one, no dropout."""
    return _ours(table, ids, torch.zeros(1, table.shape[1]), torch.zeros_like(ids), 1.0, 0.0)


def our_stage(settings: Mapping[str, Any], table: Tensor, ids: Tensor, padded: Tensor) -> tuple[Forward, Backward]:
    """The input of a model by our operators, on real ids."""
    positions = torch.arange(padded.shape[1]).expand(padded.shape)[padded != 0]
    position_rows = torch.randn(padded.shape[1], table.shape[1])
    return _ours(table, ids, position_rows, positions, math.sqrt(table.shape[1]), settings["dropout"])


def _ours(
    table: Tensor, ids: Tensor, position_rows: Tensor, positions: Tensor, scale: float, rate: float
) -> tuple[Forward, Backward]:
    ops = importlib.import_module("turbogr.ops")
    dropout = importlib.import_module("turbogr.random").Dropout(rate, seed=0) if rate else None
    keys = torch.arange(ids.numel())
    square = torch.empty_like(table)
    ops.prefer_huge_pages(square)
    square.zero_()
    grad = torch.randn(ids.numel(), table.shape[1])
    # A look-up alone has no positions to learn, so their gradient is not computed.
    learned = position_rows.shape[0] if position_rows.shape[0] > 1 else 0

    def forward() -> Any:
        return ops.embed(table, ids, position_rows, positions, scale=scale, dropout=dropout, keys=keys)

    def backward(out: Tensor) -> None:
        distinct, index = ops.unique_rows(ids, table.shape[0])
        grad_rows, _ = torch.ops.turbogr.embed_backward(
            grad, index, positions, keys, distinct.numel(), learned, scale, rate, 0
        )
        ops.row_adagrad_(table, square, distinct, grad_rows, lr=LR, eps=EPS)

    return forward, backward


def fbgemm_lookup(settings: Mapping[str, Any], table: Tensor, ids: Tensor, padded: Tensor) -> tuple[Forward, Backward]:
    """FBGEMM's table on real ids without pooling, with its Adagrad, which sums duplicates first."""
    config = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    embedding = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(table.shape[0], table.shape[1], common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=config.EmbOptimType.EXACT_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
        pooling_mode=common.PoolingMode.NONE,
    )
    embedding.split_embedding_weights()[0].copy_(table)
    offsets = torch.tensor([0, ids.numel()])
    grad = torch.randn(ids.numel(), table.shape[1])
    return lambda: embedding(ids, offsets), lambda out: out.backward(grad)


WAYS = {
    "padded_stage": padded_stage,
    "our_stage": our_stage,
    "padded_lookup": padded_lookup,
    "our_lookup": our_lookup,
    "fbgemm_lookup": fbgemm_lookup,
}


def measure(way: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the fastest forward and of the fastest backward with update, after a warm-up round."""
    torch.manual_seed(0)
    table = torch.empty(settings["num_rows"] + 1, settings["width"])
    if way.startswith("our"):
        importlib.import_module("turbogr.ops").prefer_huge_pages(table)  # as for our tables
    table.normal_()
    forward, backward = WAYS[way](settings, table, *make_ids(settings))
    seconds: dict[str, float] = {"forward": math.inf, "backward": math.inf}
    for round_number in range(settings["repeats"] + 1):
        start = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        backward(out)
        end = time.perf_counter()
        del out
        if round_number:  # optimisers create their state in round 0
            seconds = {
                "forward": min(seconds["forward"], middle - start),
                "backward": min(seconds["backward"], end - middle),
            }
    return seconds


def keep_freed_memory() -> None:
    """Do what `turbogr.ops.keep_freed_memory` does; FBGEMM's environment does not have it."""
    if sys.platform.startswith("linux"):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):
            mallopt(option, value)


def main() -> None:
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    keep_freed_memory()
    if request["settings"]["threads"]:
        torch.set_num_threads(request["settings"]["threads"])
    print(json.dumps(measure(request["way"], request["settings"])))


if __name__ == "__main__":
    main()
