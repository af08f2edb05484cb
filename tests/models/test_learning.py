"""Every model can learn: it memorises a tiny set, by the order of the items and not by which items there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from turbogr.config import LossConfig, ModelConfig, OptimizerConfig
from turbogr.data.batching import Batch, batch_from_histories
from turbogr.models import RetrievalModel
from turbogr.models.table_encoder import TableEncoder
from turbogr.negatives import LossContext
from turbogr.negatives.sampled_softmax_loss import SampledSoftmaxLoss
from turbogr.plugins import built_in_names
from turbogr.tables.row_optimizers import RowAdam
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import fetch_rows
from turbogr.training.dense_optimizer import DenseAdamW

NUM_ITEMS, NUM_USERS, LENGTH = 13, 16, 6


def make_batch() -> Batch:
    """Every item follows from the two before it, so the same items in another order lead elsewhere."""
    random = torch.Generator().manual_seed(0)
    histories = torch.randint(0, NUM_ITEMS, (NUM_USERS, 2), generator=random).tolist()
    for history in histories:
        while len(history) <= LENGTH:
            history.append((history[-2] + 2 * history[-1] + 1) % NUM_ITEMS)
    times = (torch.randint(1, 10_000, (NUM_USERS, LENGTH + 1), generator=random).cumsum(1)).tolist()
    batch = batch_from_histories([h[:-1] for h in histories], [t[:-1] for t in times], [t[-1] for t in times])
    return dataclasses.replace(batch, targets=torch.tensor([item for h in histories for item in h[1:]]))


def shuffled(batch: Batch) -> Batch:
    random = torch.Generator().manual_seed(1)
    values = torch.cat([row[torch.randperm(len(row), generator=random)] for row in batch.items])
    return dataclasses.replace(batch, items=batch.items.with_values(values))


def hit_rate(encoder: TableEncoder, batch: Batch) -> float:
    """HR@1 of the item after each history, among all items."""
    assert batch.targets is not None
    scores = encoder.encode_last(batch) @ encoder.item_rows(0, NUM_ITEMS).T
    return float((scores.argmax(1) == batch.targets[batch.last_positions]).double().mean())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Handing out tensors this small to several threads costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", built_in_names("block"))
def test_a_tiny_set_is_memorised_by_its_order(name: str) -> None:
    config = ModelConfig(name=name, dim=32, num_heads=2, max_len=LENGTH, dropout=0.0)  # type: ignore[arg-type]
    model, table = RetrievalModel(config), LocalTable(NUM_ITEMS, 32)
    generator = torch.Generator().manual_seed(0)
    model.reset_parameters(generator)
    table.draw(0, NUM_ITEMS, 0)
    optimizer = OptimizerConfig()
    dense, rows = DenseAdamW(model, optimizer), RowAdam(table.weight, optimizer)
    batch, encoder = make_batch(), TableEncoder(model, table.weight)
    objective = SampledSoftmaxLoss(LossConfig(), None, LossContext(NUM_ITEMS, 0))
    negatives = torch.arange(NUM_ITEMS).expand(batch.num_tokens, -1)
    assert hit_rate(encoder, batch) < 0.5
    for step in range(200):
        working_set = fetch_rows(table, [batch.items.values, batch.targets, negatives])
        sizes = [batch.num_tokens, batch.num_tokens, negatives.numel()]
        inputs, positives, others = working_set.index.split(sizes)
        outputs = model.encode(working_set.rows, inputs, batch, seed=step)
        candidates = positives, others.view(negatives.shape), working_set.ids
        objective.loss(outputs, working_set.rows, *candidates, batch, step).mean().backward()
        assert working_set.rows.grad is not None
        dense.step(5e-3)
        rows.update(working_set.ids, working_set.rows.grad, 5e-3, rows.begin())
        if step % 10 == 9 and hit_rate(encoder, batch) == 1.0:
            break
    assert hit_rate(encoder, batch) == 1.0
    assert hit_rate(encoder, shuffled(batch)) < 0.6
