"""Meta's public ranking model, `DlrmHSTU`, exactly as published, for conformance only.

Faults included: the normaliser and the time of the request are those of a whole batch or sequence, and the clamp of the
time buckets may be that of the wrong axis. `ranking_model.py` is the model to train.

Shape legend: T tokens (slots, history, candidates of every user), N candidates, D model width, D_t width of the tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.config import ModelConfig
from turbogr.jagged import Jagged
from turbogr.layers.stu import STUBlock, STUConfig
from turbogr.layers.tokens import Tokens
from turbogr.models.ranking_parts import ActionVectors, gated_mlp_with_norm, head_mlp
from turbogr.ops import hstu_ranges

_PI = 3.14  # as the public code has it
_HOUR, _DAY = 3600, 86400


class PublicTask(NamedTuple):
    """What is predicted: for `binary`, whether any of the bits of `weight` is set; else the watch time."""

    name: str
    weight: int
    is_binary: bool


@dataclass(frozen=True)
class PublicSizes:
    """The sizes and options of a public ranking model, by their names in a golden file.

    `contextual` has the number of slots by feature; `max_len` is the normaliser, longest slots, history and candidates.
    """

    table_dim: int
    preprocessor_hidden: int
    dim: int
    heads: int
    v_dim: int
    qk_dim: int
    layers: int
    group_norm: bool
    postprocessor: str
    contextual: Mapping[str, int]
    contextual_min_length: Mapping[str, int]
    additional_features: Sequence[str]
    item_features: Sequence[str]
    action_weights: Sequence[int]
    action_dim: int
    head_hidden: int
    tasks: Sequence[PublicTask]
    multitask_weight: float
    time_clamp: str
    max_len: int
    num_positions: int
    num_time_buckets: int

    @property
    def num_slots(self) -> int:
        return sum(self.contextual.values())


class PublicInput(NamedTuple):
    """Features of B users by name; those of candidates begin with `cand_`. `vectors` are their rows of the tables."""

    features: Mapping[str, Jagged]
    vectors: Mapping[str, Tensor]


class PublicOutput(NamedTuple):
    """`users` and `items` [N, D] are what the head compares; `losses` [tasks]; `predictions` [tasks, N]."""

    users: Tensor
    items: Tensor
    predictions: Tensor
    losses: Tensor


class PublicRankingModel(nn.Module):
    """From the features of users and candidates to a prediction per candidate and task."""

    def __init__(self, sizes: PublicSizes) -> None:
        super().__init__()
        self.sizes = sizes
        given, hidden, dim = sizes.table_dim, sizes.preprocessor_hidden, sizes.dim
        self.content = gated_mlp_with_norm(given, hidden, dim)
        if sizes.additional_features:
            self.additional = gated_mlp_with_norm(given * len(sizes.additional_features), hidden, dim)
        self.actions = ActionVectors(len(sizes.action_weights), sizes.action_dim)
        self.action = gated_mlp_with_norm(self.actions.dim, hidden, dim)
        self.slot_weight = nn.Parameter(torch.empty(sizes.num_slots, given, dim))
        self.slot_bias = nn.Parameter(torch.empty(sizes.num_slots, dim))
        self.position = nn.Parameter(torch.empty(sizes.num_positions, dim))
        self.time = nn.Parameter(torch.empty(sizes.num_time_buckets, dim))
        config = ModelConfig(
            name="stu",
            dim=dim,
            num_blocks=sizes.layers,
            num_heads=sizes.heads,
            qk_dim=sizes.qk_dim,
            v_dim=sizes.v_dim,
            max_len=sizes.max_len,
            dropout=0.0,
        )
        options = STUConfig(group_norm=sizes.group_norm)
        self.blocks = nn.ModuleList(STUBlock(config, 1 + number, options) for number in range(sizes.layers))
        self.final_norm = nn.LayerNorm(dim, eps=1e-5)
        if sizes.postprocessor == "timestamp_layer_norm":
            self.combiner = nn.Linear(dim + 4, dim)
        self.item = gated_mlp_with_norm(given * len(sizes.item_features), sizes.head_hidden, dim)
        self.head = head_mlp(dim, sizes.head_hidden, len(sizes.tasks))

    def forward(self, given: PublicInput) -> PublicOutput:
        sizes, features = self.sizes, given.features
        history, candidates = features["item_id"].lengths, features["cand_item_id"].lengths
        lengths = sizes.num_slots + history + candidates
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        kind, order = _layout(sizes.num_slots, history, candidates)
        x_td = torch.cat([self._slots(given).flatten(0, 1), self._tokens(given)])[order]
        own_times = [torch.zeros(sizes.num_slots * len(lengths)), *(features[k].values for k in _TIMES)]
        times = torch.cat([part.to(torch.int64) for part in own_times])[order]
        x_td = self._at_position(x_td, Tokens(offsets, times, times, times, None), history)
        visible = hstu_ranges(offsets, num_targets=candidates)
        tokens = Tokens(offsets, times, times, torch.arange(len(times)), None, visible)
        for block in self.blocks:
            x_td = block(x_td, tokens)
        users = self._finish(x_td[kind[order] == 2], features["query_time"].values)
        items = self.item(torch.cat([given.vectors[name] for name in sizes.item_features], dim=1))
        logits = self.head(users * items).T
        return PublicOutput(users, items, self._predictions(logits), self._losses(logits, given))

    def labels(self, given: PublicInput) -> Tensor:
        """Return what is to be predicted, [tasks, N]."""
        bits, watched = (given.features[name].values for name in ("cand_action_weight", "cand_watch_time"))
        rows = [(bits & task.weight) != 0 if task.is_binary else watched for task in self.sizes.tasks]
        return torch.stack([row.to(self.position.dtype) for row in rows])

    def _slots(self, given: PublicInput) -> Tensor:
        """Return the vectors of the slots, [B, slots, D]."""
        rows = []
        events = given.features["item_id"].lengths + given.features["cand_item_id"].lengths
        for name, size in self.sizes.contextual.items():
            values = given.features[name]
            filled = self.slot_weight.new_zeros(values.num_rows, size, self.sizes.table_dim)
            place = values.positions()
            row = torch.arange(values.num_rows).repeat_interleave(values.lengths)
            filled = filled.index_put((row[place < size], place[place < size]), given.vectors[name][place < size])
            enough = events >= self.sizes.contextual_min_length.get(name, 0)
            rows.append(filled * enough[:, None, None])
        return torch.einsum("bst,std->bsd", torch.cat(rows, dim=1), self.slot_weight) + self.slot_bias

    def _tokens(self, given: PublicInput) -> Tensor:
        """Return the vectors of all events of the histories, then of all candidates."""
        names, bits = self.sizes.additional_features, given.features["action_weight"].values
        weights = torch.tensor(self.sizes.action_weights)
        num_candidates = given.features["cand_item_id"].num_values
        happened = ((bits[:, None] & weights) != 0).to(self.position.dtype)
        values = torch.cat([happened, happened.new_zeros(num_candidates, len(weights))])
        is_known = torch.arange(len(values)) < len(bits)
        x = self.content(torch.cat([given.vectors["item_id"], given.vectors["cand_item_id"]]))
        if names:
            further = [torch.cat([given.vectors[prefix + name] for name in names], 1) for prefix in ("", "cand_")]
            x = x + self.additional(torch.cat(further))
        x_td: Tensor = x + self.action(self.actions(values, is_known))
        return x_td

    def _at_position(self, x_td: Tensor, tokens: Tokens, history: Tensor) -> Tensor:
        """Scale the tokens and add the vectors of their position, counted backwards, and of their age."""
        sizes, lengths = self.sizes, tokens.offsets.diff()
        place = tokens._replace(keys=tokens.times).positions()
        end = (sizes.num_slots + history).repeat_interleave(lengths)
        backwards = (end - torch.minimum(place, end) + sizes.num_slots).clamp(max=sizes.num_positions - 1)
        position = torch.where(place < sizes.num_slots, place, backwards)
        last = tokens.times[tokens.offsets[1:] - 1].repeat_interleave(lengths)
        age = (last - tokens.times).to(torch.float32).clamp(min=1e-6)
        largest = (sizes.dim if sizes.time_clamp == "columns" else sizes.num_time_buckets) - 1
        bucket = torch.sqrt(age / 60).floor().clamp(0, largest).to(torch.int64)
        return x_td * math.sqrt(sizes.dim) + self.position[position] + self.time[bucket]

    def _finish(self, x_nd: Tensor, query_times: Tensor) -> Tensor:
        """Return the vectors of the candidates that the head reads."""
        if self.sizes.postprocessor == "none":
            users: Tensor = x_nd / torch.linalg.vector_norm(x_nd, dim=1, keepdim=True).clamp(min=1e-6)
            return users
        if self.sizes.postprocessor == "timestamp_layer_norm":
            time = query_times.to(torch.float32)
            hour = 2 * _PI * (torch.floor(time / _HOUR) % 24) / 24
            day = 2 * _PI * (torch.floor(time / _DAY) % 7) / 7
            waves = torch.stack([hour.cos(), hour.sin(), day.cos(), day.sin()], dim=1)
            x_nd = self.combiner(torch.cat([x_nd, waves.to(x_nd.dtype)], dim=1))
        finished: Tensor = self.final_norm(x_nd)
        return finished

    def _predictions(self, logits: Tensor) -> Tensor:
        pairs = zip(self.sizes.tasks, logits, strict=True)
        return torch.stack([torch.sigmoid(row) if task.is_binary else row for task, row in pairs])

    def _losses(self, logits: Tensor, given: PublicInput) -> Tensor:
        losses = []
        for task, row, label in zip(self.sizes.tasks, logits, self.labels(given), strict=True):
            error = F.binary_cross_entropy_with_logits(row, label) if task.is_binary else F.mse_loss(row, label)
            losses.append(self.sizes.multitask_weight * error)
        return torch.stack(losses)


_TIMES = ("action_time", "query_time")


def _layout(num_slots: int, history: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return of every token whether it is a slot (0), in the history (1) or a candidate (2), [T], laid out by kind, and
    the order of the tokens by user, then kind."""
    users = torch.arange(len(history))
    counts = [torch.full_like(history, num_slots), history, candidates]
    user = torch.cat([users.repeat_interleave(count) for count in counts])
    kind = torch.repeat_interleave(torch.arange(3), torch.stack([count.sum() for count in counts]))
    return kind, torch.argsort(user * 3 + kind, stable=True)
