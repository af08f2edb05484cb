"""Theorem 6 in code: rows read ahead and refreshed train bit for bit as rows read at the last moment."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from turbogr.ops import row_adagrad_, row_adam_, unique_rows

NUM_ROWS, WIDTH, STEPS = 40, 3, 30


def batches():
    """Return ids with duplicates, a few of them popular."""
    generator = torch.Generator().manual_seed(1)
    rare = torch.randint(NUM_ROWS, (STEPS, 12), generator=generator)
    popular = torch.randint(3, (STEPS, 4), generator=generator)
    return torch.cat([rare, popular], 1)


class Training:
    def __init__(self, optimizer):
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(NUM_ROWS, WIDTH, generator=generator)
        self.dense = torch.randn(WIDTH, generator=generator)
        self.mean, self.square = torch.zeros_like(self.table), torch.zeros_like(self.table)
        self.optimizer = optimizer

    def step(self, step, distinct, index, rows):
        """Compute a loss from `rows`, whatever their source, and update the table and the dense parameter."""
        rows, dense = rows.clone().requires_grad_(), self.dense.clone().requires_grad_()
        loss = torch.tanh(rows[index] @ dense - step * 0.01).square().sum()
        loss.backward()
        self.dense = self.dense - 0.05 * dense.grad
        if self.optimizer == "adagrad":
            row_adagrad_(self.table, self.square, distinct, rows.grad, lr=0.1, eps=1e-8)
        else:
            row_adam_(
                self.table, self.mean, self.square, distinct, rows.grad,
                step=step + 1, lr=0.1, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1,
            )  # fmt: skip


def train(optimizer, *, ahead, refresh):
    """Train with up to `ahead` batches read before their turn."""
    training = Training(optimizer)
    ids = batches()
    waiting = deque()
    for step in range(STEPS):
        while len(waiting) <= ahead and step + len(waiting) < STEPS:
            distinct, index = unique_rows(ids[step + len(waiting)], NUM_ROWS)
            waiting.append((distinct, index, training.table[distinct].clone()))
        distinct, index, rows = waiting.popleft()
        training.step(step, distinct, index, rows)
        for other, _, buffer in waiting if refresh else ():
            touched = torch.isin(other, distinct)
            buffer[touched] = training.table[other[touched]]
    return training


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_refreshed_rows_train_bit_for_bit_as_fresh_ones(optimizer, ahead):
    fresh, overlapped = train(optimizer, ahead=0, refresh=False), train(optimizer, ahead=ahead, refresh=True)
    for name in ("table", "dense", "mean", "square"):
        assert torch.equal(getattr(fresh, name), getattr(overlapped, name)), name


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_without_the_refresh_the_weights_differ(optimizer):
    fresh, stale = train(optimizer, ahead=0, refresh=False), train(optimizer, ahead=1, refresh=False)
    assert not torch.equal(fresh.table, stale.table)


def test_the_share_of_refreshed_rows_is_the_one_of_the_page():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(30, generator=generator, dtype=torch.float64)
    read = torch.rand(20_000, 30, generator=generator, dtype=torch.float64) < probs
    for delay in (1, 3):
        touched = torch.stack([read[delay - 1 - back : len(read) - 1 - back] for back in range(delay)]).any(0)
        share = (touched & read[delay:]).sum() / read[delay:].sum()
        wanted = (probs * (1 - (1 - probs) ** delay)).sum() / probs.sum()
        assert float(share) == pytest.approx(float(wanted), abs=0.01)
