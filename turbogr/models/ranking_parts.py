"""Parts of ranking models: gated MLPs, vectors of actions, slots of user features, and the head.

Names of parameters inside of these parts are those of the public implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_EPS = 1e-5


class GatedNorm(nn.Module):
    """x · σ(LayerNorm(x)): the sigmoid of the norm gates the values as they are."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return x * torch.sigmoid(F.layer_norm(x, weight.shape, weight, bias, _EPS))


def gated_mlp_with_norm(given: int, hidden: int, dim: int) -> nn.Sequential:
    """Return linear, gated norm, linear, norm: [T, given] -> [T, dim]."""
    return nn.Sequential(
        nn.Linear(given, hidden), GatedNorm(hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim, eps=_EPS)
    )


def head_mlp(given: int, hidden: int, num_tasks: int) -> nn.Sequential:
    """Return linear, gated norm, linear: [n, given] -> logits [n, tasks]."""
    return nn.Sequential(nn.Linear(given, hidden), GatedNorm(hidden), nn.Linear(hidden, num_tasks))


def reset_linears(module: nn.Module, generator: torch.Generator, *, normal: bool) -> None:
    """Draw all linears of a module (Xavier normal or uniform), biases 0; norms start as 1 and 0."""
    draw = nn.init.xavier_normal_ if normal else nn.init.xavier_uniform_
    for part in module.modules():
        if isinstance(part, nn.Linear):
            draw(part.weight, generator=generator)
            nn.init.zeros_(part.bias)
        elif isinstance(part, (GatedNorm, nn.LayerNorm)):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


class ActionVectors(nn.Module):
    """A vector per token from its actions, [T, dim · actions]; tokens whose actions are not known get a learned one.

    The part of an action is its row of a table times its value, which is 0 or 1 for one that happens or not.
    """

    def __init__(self, num_actions: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(num_actions, dim))
        self.unknown = nn.Parameter(torch.empty(1, num_actions * dim))

    @property
    def dim(self) -> int:
        return self.unknown.shape[1]

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.table, std=0.1, generator=generator)
        nn.init.normal_(self.unknown, std=0.1, generator=generator)

    def forward(self, values: Tensor, is_known: Tensor) -> Tensor:
        """`values` [T, actions]; `is_known` [T] bool."""
        known = (values[:, :, None] * self.table).flatten(1)
        return torch.where(is_known[:, None], known, self.unknown)
