"""What a sequence model must never do: look ahead, mix sequences, or depend on how they are batched."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from turbogr.config import ModelConfig
from turbogr.data.batching import Batch
from turbogr.jagged import Jagged
from turbogr.layers.item_table import ItemTable
from turbogr.models import RetrievalModel
from turbogr.models.encoder import TableEncoder

NUM_ITEMS = 30


@pytest.fixture
def model() -> RetrievalModel:
    config = ModelConfig(
        dim=16, num_blocks=2, num_heads=2, qk_dim=8, v_dim=8, max_len=12, num_time_buckets=64, dropout=0.3
    )
    model = RetrievalModel(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for block in model.blocks:
            block.time_weight.mul_(50)  # so that the effect of a time is far above rounding
    return model


@pytest.fixture
def table() -> ItemTable:
    table = ItemTable(NUM_ITEMS, 16)
    table.reset_parameters(torch.Generator().manual_seed(1))
    return table


def make_batch(lengths: list[int], seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    times = torch.randint(0, 100_000, (total,), generator=random).sort().values
    return Batch(
        users=torch.arange(len(lengths)),
        items=Jagged.from_lengths(
            torch.randint(0, NUM_ITEMS, (total,), generator=random), torch.tensor(lengths, dtype=torch.int64)
        ),
        events=torch.arange(total) + 7,
        times=times,
        next_times=times + torch.randint(1, 5000, (total,), generator=random),
        targets=torch.randint(0, NUM_ITEMS, (total,), generator=random),
    )


def outputs(model: RetrievalModel, table: ItemTable, batch: Batch, seed: int | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model.encode(table.weight, batch.items.values, batch, seed=seed)


def test_no_token_sees_a_later_one_or_another_sequence(model: RetrievalModel, table: ItemTable) -> None:
    batch = make_batch([6, 4, 5])
    before = outputs(model, table, batch)
    changed = batch.items.values.clone()
    changed[8] = (changed[8] + 1) % NUM_ITEMS  # third token of the second sequence
    after = outputs(model, table, dataclasses.replace(batch, items=batch.items.with_values(changed)))
    touched = (before - after).abs().amax(dim=1) > 1e-7
    assert touched.tolist() == [False] * 8 + [True] * 2 + [False] * 5


def test_the_time_of_the_next_item_matters(model: RetrievalModel, table: ItemTable) -> None:
    batch = make_batch([6])
    next_times = batch.next_times.clone()
    next_times[3] += 10**8
    before, after = (outputs(model, table, b) for b in (batch, dataclasses.replace(batch, next_times=next_times)))
    touched = (before - after).abs().amax(dim=1) > 1e-7
    assert touched.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("seed", [None, 5])
def test_a_sequence_does_not_depend_on_its_batch(model: RetrievalModel, table: ItemTable, seed: int | None) -> None:
    batch = make_batch([6, 0, 4, 1])
    together = outputs(model, table, batch, seed)
    alone = []
    for start, stop in [(0, 6), (6, 10), (10, 11)]:
        part = slice(start, stop)
        alone.append(
            outputs(
                model,
                table,
                Batch(
                    users=torch.zeros(1, dtype=torch.int64),
                    items=Jagged.from_rows([batch.items.values[part]]),
                    events=batch.events[part],
                    times=batch.times[part],
                    next_times=batch.next_times[part],
                    targets=None,
                ),
                seed,
            )
        )
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_dropout_depends_on_the_seed(model: RetrievalModel, table: ItemTable) -> None:
    batch = make_batch([6, 4])
    assert torch.equal(outputs(model, table, batch, 1), outputs(model, table, batch, 1))
    assert not torch.equal(outputs(model, table, batch, 1), outputs(model, table, batch, 2))


def test_loss_through_a_working_set_is_the_loss_through_the_table(model: RetrievalModel, table: ItemTable) -> None:
    batch = make_batch([6, 4])
    negatives = torch.randint(0, NUM_ITEMS, (10, 7), generator=torch.Generator().manual_seed(3))
    ids = model.ids(batch, negatives)
    working_set = table.fetch(ids)
    loss = model.loss(working_set.rows, working_set.index, batch, temperature=0.05, seed=3)
    loss.sum().backward()

    weight = table.weight.clone().requires_grad_()
    direct = model.loss(weight, ids, batch, temperature=0.05, seed=3)
    direct.sum().backward()
    torch.testing.assert_close(loss, direct)
    assert weight.grad is not None and working_set.rows.grad is not None
    torch.testing.assert_close(working_set.rows.grad, weight.grad[working_set.ids], rtol=1e-4, atol=1e-5)
    others = torch.ones(NUM_ITEMS, dtype=torch.bool)
    others[working_set.ids] = False
    assert not weight.grad[others].any()


def test_encoder_returns_unit_vectors_of_the_last_tokens(model: RetrievalModel, table: ItemTable) -> None:
    batch = make_batch([6, 4, 1])
    encoder = TableEncoder(model, table)
    vectors = encoder.encode_last(batch)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    expected = outputs(model, table, batch)[[5, 9, 10]]
    torch.testing.assert_close(vectors, torch.nn.functional.normalize(expected))
    torch.testing.assert_close(encoder.item_rows(3, 9), torch.nn.functional.normalize(table.weight[3:9]))
