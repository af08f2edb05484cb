"""Optimisers of table rows: they change only the rows that a step used.

Each has `state()`: a dict of its own tensors, which a checkpoint saves and loads in place. A tensor without dimensions
counts something for the whole table; all others have a row for every row of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turbogr.config import OptimizerConfig
from turbogr.ops import prefer_huge_pages, row_adagrad_, row_adam_


class RowOptimizer(Protocol):
    """Updates the rows that a step used, at once or in parts that have no row in common."""

    def begin(self) -> int:
        """Count a step and return its number."""
        ...

    def update(self, slots: Tensor, grad: Tensor, lr: float, number: int) -> None:
        """Update the distinct rows `slots` [R] by their gradients [R, d], in the step of this number."""
        ...

    def state(self) -> dict[str, Tensor]: ...


class RowAdam:
    """Adam with decoupled weight decay on the rows used; the others keep their moments."""

    def __init__(self, weight: Tensor, config: OptimizerConfig) -> None:
        self.weight, self.config = weight, config
        self.mean, self.square = _zeros_like_table(weight), _zeros_like_table(weight)
        self.num_steps = torch.zeros((), dtype=torch.int64)

    def begin(self) -> int:
        self.num_steps += 1
        return int(self.num_steps)

    def update(self, slots: Tensor, grad: Tensor, lr: float, number: int) -> None:
        row_adam_(
            self.weight,
            self.mean,
            self.square,
            slots,
            grad,
            step=number,
            lr=lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
        )

    def state(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "square": self.square, "num_steps": self.num_steps}


class RowAdagrad:
    """Adagrad on the rows used."""

    def __init__(self, weight: Tensor, config: OptimizerConfig) -> None:
        self.weight, self.config = weight, config
        self.square = _zeros_like_table(weight)

    def begin(self) -> int:
        return 0

    def update(self, slots: Tensor, grad: Tensor, lr: float, number: int) -> None:
        row_adagrad_(self.weight, self.square, slots, grad, lr=lr, eps=self.config.eps)

    def state(self) -> dict[str, Tensor]:
        return {"square": self.square}


@dataclass(frozen=True)
class _Kind:
    make: type[RowAdam] | type[RowAdagrad]
    num_tensors: int


_KINDS = {"adam": _Kind(RowAdam, 3), "adagrad": _Kind(RowAdagrad, 2)}


def make_row_optimizer(name: str, weight: Tensor, config: OptimizerConfig) -> RowOptimizer:
    """Return the optimiser of this name for a table's `weight`."""
    return _KINDS[name].make(weight, config)


def tensors_per_table(name: str) -> int:
    """Return how many tensors of the table's size training with this optimiser keeps, the weights included."""
    return _KINDS[name].num_tensors


def _zeros_like_table(weight: Tensor) -> Tensor:
    """Return zeros in the shape of a table, in huge pages where the system has them."""
    zeros = torch.empty_like(weight)
    prefer_huge_pages(zeros)
    return zeros.zero_()
