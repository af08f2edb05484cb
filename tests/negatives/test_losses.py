"""The built-in losses besides sampled softmax: their formulas, what they draw, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.negatives.batches import make_batch
from turbogr.config import Config, LossConfig, load_config
from turbogr.errors import UserError
from turbogr.negatives import Loss, LossContext, make_loss
from turbogr.negatives.binary_losses import CalibratedBinaryCrossEntropy, binary_cross_entropy, calibration_power

NUM_ITEMS, WIDTH = 30, 8


def loss_named(name: str, options: dict[str, Any] | None = None, **settings: Any) -> Loss:
    config = Config(loss=LossConfig(name=name, **settings), options=options or {})
    return make_loss(config, LossContext(NUM_ITEMS, seed=3))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=1e-6)


def test_full_softmax_is_the_cross_entropy_among_all_items() -> None:
    batch, loss = make_batch([5, 3], NUM_ITEMS), loss_named("full-softmax", temperature=0.1)
    assert batch.targets is not None
    outputs, rows = vectors(8, WIDTH), vectors(NUM_ITEMS, WIDTH, seed=1)
    everything = loss.draw(batch, 0)
    assert everything is not None and everything.tolist() == list(range(NUM_ITEMS))
    ours = loss.loss(outputs, rows, batch.targets, everything.long(), everything, batch, 0)
    expected = F.cross_entropy(unit(outputs) @ unit(rows).T / 0.1, batch.targets, reduction="none")
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert loss.num_scored == NUM_ITEMS - 1


@pytest.mark.parametrize("order", ["beside other tables", "by owner"])
def test_full_softmax_finds_the_items_among_the_rows(order: str) -> None:
    """Other rows have no part in it, and the bits do not depend on where the items' rows are."""
    batch, loss = make_batch([5, 3], NUM_ITEMS), loss_named("full-softmax")
    assert batch.targets is not None
    outputs, items = vectors(8, WIDTH), vectors(NUM_ITEMS, WIDTH, seed=1)
    places = torch.arange(NUM_ITEMS) + 4
    if order == "by owner":
        places = torch.randperm(NUM_ITEMS + 9, generator=torch.Generator().manual_seed(0))[:NUM_ITEMS]
    rows = torch.full((NUM_ITEMS + 9, WIDTH), float("nan")).index_copy(0, places, items.detach()).requires_grad_()

    def result(rows: Tensor, index: Tensor) -> list[Tensor]:
        assert batch.targets is not None
        losses = loss.loss(outputs, rows, index[batch.targets], index, torch.zeros(0), batch, 0)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), [outputs, rows])]

    plain, found = result(items, torch.arange(NUM_ITEMS)), result(rows, places)
    assert torch.equal(plain[0], found[0]) and torch.equal(plain[1], found[1])
    assert torch.equal(plain[2], found[2][places])
    assert int(found[2].any(1).sum()) == NUM_ITEMS


@pytest.mark.parametrize("name", ["bce", "gbce"])
def test_binary_losses_are_their_formulas(name: str) -> None:
    batch = make_batch([5, 3], NUM_ITEMS)
    loss = loss_named(name, num_negatives=6, temperature=0.5)
    assert batch.targets is not None
    negatives = loss.draw(batch, 7)
    assert negatives is not None and negatives.shape == (8, 6)
    negatives[2, 3] = batch.targets[2]  # left out
    outputs, rows = vectors(8, WIDTH), vectors(NUM_ITEMS, WIDTH, seed=1)
    ours = loss.loss(outputs, rows, batch.targets, negatives, torch.arange(NUM_ITEMS), batch, 7)
    logits = unit(outputs) @ unit(rows).T / 0.5
    rate = 6 / (NUM_ITEMS - 1)
    beta = 1.0 if name == "bce" else rate * (0.75 * (1 - 1 / rate) + 1 / rate)
    for t in range(8):
        target = int(batch.targets[t])
        others = [int(j) for j in negatives[t] if int(j) != target]
        probability = torch.sigmoid(logits[t])
        expected = -(torch.log(probability[target] ** beta) + torch.log(1 - probability[others]).sum()) / 7
        torch.testing.assert_close(ours[t], expected, rtol=1e-4, atol=1e-5)


def test_gbce_without_calibration_is_bce_and_the_power_follows_from_the_rate() -> None:
    assert calibration_power(0.0, 10, 100) == 1.0
    assert calibration_power(1.0, 10, 101) == pytest.approx(0.1)
    assert calibration_power(0.5, 500, 100) == 1.0, "more negatives than items"
    assert calibration_power(0.75, 1, 1) == 1.0


def test_the_section_of_gbce_sets_its_calibration(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{loss: {name: gbce, num_negatives: 6}, gbce: {t: 0.5}}")
    loss = make_loss(load_config(recipe), LossContext(NUM_ITEMS, seed=3))
    assert isinstance(loss, CalibratedBinaryCrossEntropy)
    assert loss.beta() == calibration_power(0.5, 6, NUM_ITEMS) == pytest.approx(1 - 0.5 * (1 - 6 / 29))


def test_binary_cross_entropy_of_large_logits_is_finite() -> None:
    logits = torch.tensor([[-200.0, 200.0], [200.0, -200.0]], requires_grad=True)
    losses = binary_cross_entropy(logits, torch.zeros(2, 1, dtype=torch.bool), 0.5)
    torch.testing.assert_close(losses, torch.tensor([150.0, 0.0]))
    losses.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("full-softmax", {"num_negatives": 64}),
        ("full-softmax", {"sampler": "popularity"}),
        ("full-softmax", {"expansion": 2}),
        ("bce", {"precision": "fp16"}),
        ("gbce", {"segment_mb": 4.0}),
    ],
)
def test_settings_without_effect_are_refused(name: str, setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"loss.{next(iter(setting))} has no effect on the loss '{name}'"):
        loss_named(name, **setting)
