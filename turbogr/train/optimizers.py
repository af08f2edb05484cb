"""AdamW for dense parameters, row-wise optimisers for the item table, and the learning rate over time.

Each has `state()`: a nested dict of its own tensors, which a checkpoint saves and loads in place.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from turbogr.config import OptimizerConfig
from turbogr.ops import prefer_huge_pages, row_adagrad_, row_adam_


class DenseAdamW:
    """torch's AdamW, with its state made at once instead of at the first step."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._adamw = torch.optim.AdamW(
            self._names, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        for parameter in self._names:
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float) -> None:
        """Update all parameters by their gradients, and drop the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {name: dict(self._adamw.state[parameter]) for parameter, name in self._names.items()}


class RowOptimizer(Protocol):
    """Updates the rows of a table that a step touched, at once or in parts that have no row in common."""

    def begin(self) -> int:
        """Count a step and return its number."""
        ...

    def update(self, ids: Tensor, grad: Tensor, lr: float, number: int) -> None:
        """Update rows `ids` [R], distinct, by their gradients [R, d], as the step of this number does."""
        ...

    def state(self) -> dict[str, Any]: ...


class RowAdam:
    """Adam with decoupled weight decay on the touched rows; the others keep their moments."""

    def __init__(self, weight: Tensor, config: OptimizerConfig) -> None:
        self.weight, self.config = weight, config
        self.mean, self.square = _zeros_beside(weight), _zeros_beside(weight)
        self.num_steps = torch.zeros((), dtype=torch.int64)

    def begin(self) -> int:
        self.num_steps += 1
        return int(self.num_steps)

    def update(self, ids: Tensor, grad: Tensor, lr: float, number: int) -> None:
        row_adam_(
            self.weight,
            self.mean,
            self.square,
            ids,
            grad,
            step=number,
            lr=lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
        )

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean, "square": self.square, "num_steps": self.num_steps}


class RowAdagrad:
    """Adagrad on the touched rows."""

    def __init__(self, weight: Tensor, config: OptimizerConfig) -> None:
        self.weight, self.config = weight, config
        self.square = _zeros_beside(weight)

    def begin(self) -> int:
        return 0

    def update(self, ids: Tensor, grad: Tensor, lr: float, number: int) -> None:
        row_adagrad_(self.weight, self.square, ids, grad, lr=lr, eps=self.config.eps)

    def state(self) -> dict[str, Any]:
        return {"square": self.square}


def _zeros_beside(weight: Tensor) -> Tensor:
    """Zeros in the shape of a table, in memory that suits it as well."""
    zeros = torch.empty_like(weight)
    prefer_huge_pages(zeros)
    return zeros.zero_()


def make_row_optimizer(weight: Tensor, config: OptimizerConfig) -> RowOptimizer:
    """Build the row optimiser that a config names."""
    kinds: dict[str, type[RowAdam] | type[RowAdagrad]] = {"adam": RowAdam, "adagrad": RowAdagrad}
    return kinds[config.table](weight, config)


def lr_factor(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return what multiplies the learning rate at `step` (from 0) of about `num_steps`."""
    warmup = config.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr_fraction + (1.0 - config.final_lr_fraction) * shape
