"""The user side of a retrieval model as one graph over padded sequences, for `torch.export` and ONNX.

It takes item rows and times, not raw ids, and returns a unit vector per user. It consists of the model's own blocks,
whose operators have their padded form here (`ops.registry.padded`), so a block comes along if its operators do.
Shape legend: B users, N events (any number up to max_len), T = B · N, V items, D model width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.errors import UserError
from turbogr.layers.tokens import Tokens
from turbogr.models.retrieval_model import RetrievalModel
from turbogr.ops.registry import padded
from turbogr.ops.sampled_softmax.reference import NORM_EPS, unit

INPUTS = ("items", "times", "lengths", "request_times")
OUTPUT = "user_vectors"


class PaddedTokens(Tokens):
    """Tokens of B sequences padded to N each."""

    def positions(self) -> Tensor:
        num_sequences = self.offsets.shape[0] - 1
        places = torch.arange(self.keys.shape[0] // num_sequences, device=self.keys.device)
        return places.expand(num_sequences, -1).reshape(-1)


class UserGraph(nn.Module):
    """(item vectors [V, D], their norms [V], items [B, N], times [B, N], lengths [B], request times [B]) -> [B, D].

    `items` are rows, the oldest first, `times` int64 seconds; what stands behind the first `lengths` events of a row is
    not read as anything but numbers and must be valid rows. A row of the table is a vector times its norm.

    Raises:
        UserError: the model reads features, which the graph's inputs do not have.
    """

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        if model.features:
            names = ", ".join(model.features)
            raise UserError(
                f"the model reads features of events ({names}), and an exported graph takes items and times alone; "
                "train a model without the features to export it"
            )
        self.model = model

    def forward(
        self, vectors: Tensor, norms: Tensor, items: Tensor, times: Tensor, lengths: Tensor, request_times: Tensor
    ) -> Tensor:
        model = self.model
        num_users, num_events = items.shape
        places = torch.arange(num_events, device=items.device)
        items_t, places_t = items.reshape(-1), places.expand(num_users, -1).reshape(-1)
        rows_td = F.embedding(items_t, vectors) * F.embedding(items_t, norms[:, None])
        x_td = rows_td * math.sqrt(model.dim) + F.embedding(places_t, model.position)
        is_last = places[None, :] == lengths[:, None] - 1
        following = times.index_select(1, (places + 1).clamp(max=num_events - 1))
        next_times = torch.where(is_last, request_times[:, None], following)
        offsets = torch.arange(num_users + 1, device=items.device) * num_events
        keys = torch.zeros_like(times).view(-1)
        tokens = PaddedTokens(offsets, times.reshape(-1), next_times.reshape(-1), keys, None)
        visible = model.mask.ranges(tokens)
        if visible is not None:
            tokens = tokens._replace(visible=visible)
        for block in model.blocks:
            x_td = block(x_td, tokens)
        x_bnd = x_td.view(num_users, num_events, model.dim)
        last_bd = (x_bnd * is_last[:, :, None].to(x_bnd.dtype)).sum(1)
        found: Tensor = unit(last_bd)
        return found


def table_norms(rows: Tensor) -> Tensor:
    """Return the length [V] of every row, at least `NORM_EPS`: a unit vector times it is the row again."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.clamp(min=NORM_EPS)


def trace_user_graph(model: RetrievalModel, num_items: int) -> torch.export.ExportedProgram:
    """Return the graph of a model in fp32, with any number of users and of events up to max_len.

    Raises:
        UserError: the model reads features, or its block or mask has no exported form.
    """
    graph = UserGraph(model).eval()
    num_users, num_events = 3, min(5, model.max_len)
    times = torch.zeros(num_users, num_events, dtype=torch.int64)
    inputs = (
        torch.zeros(num_items, model.dim),
        torch.ones(num_items),
        torch.zeros_like(times),
        times,
        torch.ones(num_users, dtype=torch.int64),
        torch.zeros(num_users, dtype=torch.int64),
    )
    users, events = torch.export.Dim("users", min=1), torch.export.Dim("events", min=1, max=model.max_len)
    by_event = {0: users} if model.max_len == 1 else {0: users, 1: events}
    shapes = (None, None, by_event, by_event, {0: users}, {0: users})
    with padded(), torch.no_grad():
        try:
            return torch.export.export(graph, inputs, dynamic_shapes=shapes, strict=False)
        except UserError:
            raise
        except Exception as error:
            name = model.config.name
            raise UserError(
                f"the block '{name}' with the mask '{model.config.mask}' cannot be exported: its computation cannot be "
                f"written as one graph over padded sequences ({' '.join(str(error).split())[:300]}). It must use our "
                "operators, which have a padded form, or PyTorch's on tokens one by one"
            ) from error
