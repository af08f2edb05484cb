"""Vectors of items, events or users from their features: rows of tables, numbers and content vectors, summed.

Shape legend: n items, events or users, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.jagged import Jagged


@dataclass(frozen=True)
class Feature:
    """A feature that batches carry: the store's `column`, whose it is, and what a value is.

    A category is looked up in `table`, whose rows have the width `dim`; numbers and vectors are `dim` floats and have
    no table.
    """

    name: str
    column: str
    table: str | None
    dim: int
    kind: str = "category"
    owner: str = "event"


class FeatureTower(nn.Module):
    """The sum of the vectors of several features, [n, D].

    Rows of tables are scaled by √D, and projected where their width is not D. Numbers, and `num_floats` further ones,
    pass through an MLP of two layers together; a content vector is normalised and projected.
    """

    def __init__(self, features: Sequence[Feature], dim: int, hidden: int, num_floats: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self.looked_up = [feature for feature in features if feature.table is not None]
        self.numbers = [feature for feature in features if feature.kind == "number"]
        self.vectors = [feature for feature in features if feature.kind == "vector"]
        widths = {f.name: f.dim for f in self.looked_up if f.dim != dim} | {f.name: f.dim for f in self.vectors}
        self.projections = nn.ParameterDict({n: nn.Parameter(torch.empty(width, dim)) for n, width in widths.items()})
        self.num_floats = given = sum(feature.dim for feature in self.numbers) + num_floats
        self.mlp = nn.Sequential(nn.Linear(given, hidden), nn.SiLU(), nn.Linear(hidden, dim)) if given else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        for weight in self.projections.values():
            nn.init.xavier_normal_(weight, generator=generator)
        for part in self.mlp or ():
            if isinstance(part, nn.Linear):
                nn.init.xavier_normal_(part.weight, generator=generator)
                nn.init.zeros_(part.bias)

    def floats(self, values: Mapping[str, Tensor], further: Tensor | None = None) -> Tensor:
        """Return the numbers beside each other, and `further` ones, [n, `num_floats`]."""
        given = [values[feature.name] for feature in self.numbers]
        return torch.cat([*given, *([] if further is None else [further])], dim=1)

    def forward(self, values: Mapping[str, Tensor], floats: Tensor | None = None) -> Tensor | None:
        """Return the sum, None of no features; `values` has rows, numbers or vectors by feature, [n, `dim`] each."""
        parts = []
        for feature in self.looked_up:
            rows = values[feature.name] * math.sqrt(self.dim)
            parts.append(rows @ self.projections[feature.name] if feature.name in self.projections else rows)
        for feature in self.vectors:
            unit = F.normalize(values[feature.name], dim=1) * math.sqrt(feature.dim)
            parts.append(unit @ self.projections[feature.name])
        if self.mlp is not None:
            parts.append(self.mlp(self.floats(values, floats)))
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0] if parts else None


def mean_of_rows(vectors: Tensor, rows: Jagged) -> Tensor:
    """Return the mean vector [n, d] of every row of `rows`, of which `vectors` [N, d] has the values'; 0 of none."""
    summed = vectors.new_zeros(rows.num_rows, vectors.shape[1]).index_add(0, rows.row_index(), vectors)
    return summed / rows.lengths.clamp(min=1)[:, None]
