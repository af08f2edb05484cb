"""Measure the look-up of a batch in several tables, ours and PyTorch's in turn; a script like `_embedding`.

It reads the number of tables and the settings as JSON from standard input, and prints as JSON the seconds of every
forward and backward of each side.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from turbogr.bench._embedding import draw_zipf_ids
from turbogr.config import OptimizerConfig
from turbogr.ops import keep_freed_memory, look_up_rows, unique_rows
from turbogr.tables.embedding_tables import EmbeddingTables, TableSpec
from turbogr.tables.table import LocalTable, RowGradients
from turbogr.tables.working_set import TableIds, WorkingSets


class Feature:
    """Ids of one feature: `ids` [n], from 1, and the same padded with 0 to `padded` [sequences, max_len]."""

    def __init__(self, lengths: Tensor, max_len: int, num_rows: int, random: torch.Generator) -> None:
        self.ids = draw_zipf_ids(int(lengths.sum()), num_rows, random)
        self.real = torch.arange(max_len)[None, :] < lengths[:, None]
        self.padded = torch.zeros(self.real.shape, dtype=torch.int64)
        self.padded[self.real] = self.ids


def make_features(settings: Mapping[str, Any], num_tables: int) -> list[Feature]:
    """Draw a feature per table. All together they have `num_ids` ids, of which `num_padding` are padding."""
    random = torch.Generator().manual_seed(0)
    lengths = draw_lengths(settings, random)
    num_rows = settings["num_rows"] // num_tables
    return [Feature(part, settings["max_len"], num_rows, random) for part in lengths.tensor_split(num_tables)]


def draw_lengths(settings: Mapping[str, Any], random: torch.Generator) -> Tensor:
    """Draw the sequences' lengths, 0 to max_len; their sum is that of the real ids exactly."""
    max_len, num_real = settings["max_len"], settings["num_ids"] - settings["num_padding"]
    num_sequences = settings["num_ids"] // max_len
    mean = num_real // num_sequences
    lengths = torch.full((num_sequences,), mean)
    lengths[: num_real - int(lengths.sum())] += 1
    # What one sequence gains the next one loses, so the sum stays. Two gains must not lead out of 0 to max_len.
    most = max(0, min(mean, max_len - mean - 1) // 2)
    gains = torch.randint(-most, most + 1, lengths.shape, generator=random)
    return lengths + gains - gains.roll(1)


class Side(Protocol):
    """One implementation. `forward` returns a vector for every id; `backward` starts from their gradients."""

    def forward(self) -> Any: ...

    def backward(self, found: Any) -> Any: ...


class Ours:
    """`EmbeddingTables`: a vector for every real id, and the gradient of every distinct row."""

    def __init__(self, features: list[Feature], tables: EmbeddingTables, grads: list[Tensor]) -> None:
        self._tables, self._grads = tables, grads
        self._ids = {name: TableIds([feature.ids]) for name, feature in zip(names(features), features, strict=True)}

    def forward(self) -> tuple[WorkingSets, list[Tensor]]:
        sets = self._tables.fetch(self._ids)
        vectors = sets.look_up_inputs(self._ids, sets.groups[0].rows.device)
        return sets, [vectors[name][0] for name in self._ids]

    def backward(self, found: tuple[WorkingSets, list[Tensor]]) -> list[RowGradients]:
        sets, vectors = found
        torch.autograd.backward(vectors, self._grads)
        return self._tables.sum_gradients([group.request for group in sets.groups], sets.gradients())


class Bare:
    """The look-up of one table alone: forward a vector for every real id; backward finds the distinct rows and sums."""

    def __init__(self, feature: Feature, weight: Tensor, grad: Tensor) -> None:
        self._ids, self._weight, self._grad = feature.ids, weight, grad
        self._zeros, self._keys = torch.zeros_like(feature.ids), torch.arange(feature.ids.numel())

    def forward(self) -> list[Tensor]:
        return look_up_rows(self._weight, self._ids, [self._ids.numel()])

    def backward(self, found: list[Tensor]) -> tuple[Tensor, Tensor]:
        distinct, index = unique_rows(self._ids, self._weight.shape[0])
        options = (self._zeros, self._keys, distinct.numel(), 0, 1.0, 0.0, 0)
        return distinct, torch.ops.turbogr.embed_backward(self._grad, index, *options)[0]


class Padded:
    """One `nn.Embedding` per table: a vector for every padded id.

    The gradient is a tensor of each whole table, or with `sparse` the sum of every distinct row, as ours.
    """

    def __init__(self, features: list[Feature], weights: list[nn.Parameter], grads: list[Tensor], sparse: bool) -> None:
        self._ids, self._grads, self._sparse = [feature.padded for feature in features], grads, sparse
        self._embeddings = [
            nn.Embedding(weight.shape[0], weight.shape[1], padding_idx=0, sparse=sparse, _weight=weight)
            for weight in weights
        ]

    def forward(self) -> list[Tensor]:
        return [embedding(ids) for embedding, ids in zip(self._embeddings, self._ids, strict=True)]

    def backward(self, found: list[Tensor]) -> list[Tensor]:
        weights = [embedding.weight for embedding in self._embeddings]
        grads = torch.autograd.grad(found, weights, self._grads)
        return [grad.coalesce() for grad in grads] if self._sparse else list(grads)


def names(features: list[Feature]) -> list[str]:
    return [f"table{number}" for number in range(len(features))]


def make_sides(settings: Mapping[str, Any], features: list[Feature]) -> dict[str, Side]:
    """Make all sides with the same tables and the same gradients of real ids; that of padding is 0."""
    num_rows, width = settings["num_rows"] // len(features) + 1, settings["width"]
    specs = [TableSpec(name, num_rows, width, "adagrad") for name in names(features)]
    tables = EmbeddingTables(specs, LocalTable, OptimizerConfig())
    tables.draw(0)
    weights = [nn.Parameter(tables.gather(spec.name).clone()) for spec in specs]
    grads, padded_grads = [], []
    for feature in features:
        grads.append(torch.randn(feature.ids.numel(), width))
        padded_grads.append(torch.zeros(*feature.padded.shape, width))
        padded_grads[-1][feature.real] = grads[-1]
    bare = {"bare": Bare(features[0], weights[0].detach(), grads[0])} if len(features) == 1 else {}
    return {
        **bare,
        "ours": Ours(features, tables, grads),
        "dense": Padded(features, weights, padded_grads, sparse=False),
        "sparse": Padded(features, weights, padded_grads, sparse=True),
    }


def measure(settings: Mapping[str, Any], num_tables: int) -> dict[str, dict[str, list[float]]]:
    """Return by side the seconds of every forward and backward, all sides in turn, after a warm-up round."""
    torch.manual_seed(0)
    sides = make_sides(settings, make_features(settings, num_tables))
    seconds: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in sides}
    for round_number in range(settings["repeats"] + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            found = side.forward()
            middle = time.perf_counter()
            gradients = side.backward(found)
            end = time.perf_counter()
            del found, gradients
            if round_number:
                seconds[name]["forward"].append(middle - start)
                seconds[name]["backward"].append(end - middle)
    return seconds


def main() -> None:
    request = json.load(sys.stdin)
    keep_freed_memory()
    if request["settings"]["threads"]:
        torch.set_num_threads(request["settings"]["threads"])
    print(json.dumps(measure(request["settings"], request["num_tables"])))


if __name__ == "__main__":
    main()
