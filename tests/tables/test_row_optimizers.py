from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from turbogr.config import OptimizerConfig
from turbogr.tables.row_optimizers import RowAdagrad, RowAdam
from turbogr.training.dense_optimizer import lr_factor


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_row_adam_on_all_rows_is_adamw(weight_decay: float) -> None:
    torch.manual_seed(0)
    config = OptimizerConfig(lr=1e-2, weight_decay=weight_decay)
    ours = torch.randn(7, 5)
    theirs = nn.Parameter(ours.clone())
    row_adam = RowAdam(ours, config)
    adamw = torch.optim.AdamW([theirs], lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=weight_decay)
    for _ in range(20):
        grad = torch.randn(7, 5)
        theirs.grad = grad.clone()
        adamw.step()
        row_adam.update(torch.arange(7), grad, 1e-2, row_adam.begin())
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_row_adagrad_on_all_rows_is_adagrad() -> None:
    torch.manual_seed(0)
    config = OptimizerConfig(eps=1e-8)
    ours = torch.randn(7, 5)
    theirs = nn.Parameter(ours.clone())
    row_adagrad = RowAdagrad(ours, config)
    adagrad = torch.optim.Adagrad([theirs], lr=1e-2, eps=1e-8)
    for _ in range(20):
        grad = torch.randn(7, 5)
        theirs.grad = grad.clone()
        adagrad.step()
        row_adagrad.update(torch.arange(7), grad, 1e-2, row_adagrad.begin())
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [RowAdam, RowAdagrad])
def test_rows_that_are_not_named_keep_weight_and_state(kind: type[RowAdam] | type[RowAdagrad]) -> None:
    weight = torch.randn(6, 3)
    before = weight.clone()
    optimizer = kind(weight, OptimizerConfig())
    optimizer.update(torch.tensor([1, 4]), torch.randn(2, 3), 0.1, optimizer.begin())
    untouched = [0, 2, 3, 5]
    assert torch.equal(weight[untouched], before[untouched])
    assert not torch.equal(weight[[1, 4]], before[[1, 4]])
    assert not optimizer.square[untouched].any()


def test_learning_rate_rises_then_falls() -> None:
    config = OptimizerConfig(warmup_steps=4, schedule="cosine", final_lr_fraction=0.1)
    factors = [lr_factor(step, 20, config) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in pairwise(factors[3:]))
    assert factors[12] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors[20:] == [pytest.approx(0.1)] * 5
    linear = OptimizerConfig(schedule="linear")
    assert lr_factor(5, 10, linear) == 0.5
    assert lr_factor(10**6, 10, OptimizerConfig()) == 1.0
    assert math.isclose(lr_factor(0, 10, linear), 1.0)
