"""AdamW for the dense parameters, and the learning rate over time.

`state()` is a nested dict of the optimiser's own tensors, which a checkpoint saves and loads in place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from turbogr.config import OptimizerConfig


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


def lr_factor(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return the factor of the learning rate at `step` (from 0) of about `num_steps`."""
    warmup = config.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr_fraction + (1.0 - config.final_lr_fraction) * shape
