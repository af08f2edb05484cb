"""What a sequence model must never do: look ahead, mix sequences, or depend on how they are batched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from turbogr.config import LossConfig, ModelConfig
from turbogr.data.batching import Batch
from turbogr.errors import UserError
from turbogr.jagged import Jagged
from turbogr.layers.tokens import Tokens
from turbogr.models import RetrievalModel
from turbogr.models.table_encoder import TableEncoder
from turbogr.negatives import LossContext
from turbogr.negatives.sampled_softmax_loss import SampledSoftmaxLoss
from turbogr.plugins import built_in_names, find
from turbogr.random import Dropout
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import fetch_rows

NUM_ITEMS = 30


@pytest.fixture(params=built_in_names("block"))
def model(request: pytest.FixtureRequest) -> RetrievalModel:
    return make_model(request.param)


def make_model(name: str, **changes: int) -> RetrievalModel:
    config = ModelConfig(
        name=name,  # type: ignore[arg-type]
        **{"dim": 16, "num_heads": 2, "max_len": 12, "num_time_buckets": 64, **changes},
        dropout=0.3,
    )
    model = RetrievalModel(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "time_weight" in parameter_name and parameter.numel() > 3:
                parameter.mul_(50)  # so that the effect of a time is far above rounding
    return model


@pytest.fixture
def table() -> LocalTable:
    table = LocalTable(NUM_ITEMS, 16)
    table.draw(0, NUM_ITEMS, 1)
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


def outputs(model: RetrievalModel, table: LocalTable, batch: Batch, seed: int | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model.encode(table.weight, batch.items.values, batch, seed=seed)


def test_no_token_sees_a_later_one_or_another_sequence(model: RetrievalModel, table: LocalTable) -> None:
    batch = make_batch([6, 4, 5])
    before = outputs(model, table, batch)
    changed = batch.items.values.clone()
    changed[8] = (changed[8] + 1) % NUM_ITEMS  # third token of the second sequence
    after = outputs(model, table, dataclasses.replace(batch, items=batch.items.with_values(changed)))
    touched = (before - after).abs().amax(dim=1) > 1e-7
    assert touched.tolist() == [False] * 8 + [True] * 2 + [False] * 5


@pytest.mark.parametrize("name", [name for name in built_in_names("block") if name not in ("sasrec", "stu")])
def test_the_time_of_the_next_item_matters(name: str, table: LocalTable) -> None:
    model = make_model(name)
    for block in model.blocks:
        if name == "fuxi-gamma":  # as it is drawn it forgets within seconds
            nn.init.constant_(block.time_exponent, 0.05)  # type: ignore[arg-type]
    batch = make_batch([6])
    next_times = batch.next_times.clone()
    next_times[3] += 10**8
    before, after = (outputs(model, table, b) for b in (batch, dataclasses.replace(batch, next_times=next_times)))
    touched = (before - after).abs().amax(dim=1) > 1e-7
    assert touched.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("seed", [None, 5])
def test_a_sequence_does_not_depend_on_its_batch(model: RetrievalModel, table: LocalTable, seed: int | None) -> None:
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


def test_sasrec_does_not_look_at_times(table: LocalTable) -> None:
    batch = make_batch([6, 4])
    later = dataclasses.replace(batch, times=batch.times * 3, next_times=batch.next_times + 10**6)
    model = make_model("sasrec")
    assert torch.equal(outputs(model, table, batch), outputs(model, table, later))


def test_every_dropout_has_a_site_of_its_own(
    model: RetrievalModel, table: LocalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    real = Tokens.dropout

    def note(tokens: Tokens, rate: float, site: int) -> Dropout | None:
        used.append(site)
        return real(tokens, rate, site)

    monkeypatch.setattr(Tokens, "dropout", note)
    outputs(model, table, make_batch([3]), seed=1)
    num_sites = find("block", model.config.name).factory.num_sites
    assert sorted(used) == list(range(1 + 2 * num_sites))


@pytest.mark.parametrize("name", ["hstu", "fuxi-alpha"])
def test_positions_beyond_the_longest_distance_share_its_weight(name: str, table: LocalTable) -> None:
    short, full = make_model(name, max_distance=4), make_model(name)
    with torch.no_grad():
        weights = dict(short.named_parameters())
        for parameter_name, parameter in full.named_parameters():
            value = weights[parameter_name]
            if parameter_name.endswith("position_weight"):
                value = torch.cat([value[:1].expand(8), value, value[-1:].expand(8)])
            parameter.copy_(value)
    batch = make_batch([12, 7])
    assert short.blocks[0].position_weight.shape == (7,)
    torch.testing.assert_close(outputs(short, table, batch), outputs(full, table, batch))


def test_dropout_depends_on_the_seed(model: RetrievalModel, table: LocalTable) -> None:
    batch = make_batch([6, 4])
    assert torch.equal(outputs(model, table, batch, 1), outputs(model, table, batch, 1))
    assert not torch.equal(outputs(model, table, batch, 1), outputs(model, table, batch, 2))


def test_loss_through_a_working_set_is_the_loss_through_the_table(model: RetrievalModel, table: LocalTable) -> None:
    batch = make_batch([6, 4])
    negatives = torch.randint(0, NUM_ITEMS, (10, 7), generator=torch.Generator().manual_seed(3))
    assert batch.targets is not None
    ids = [batch.items.values, batch.targets, negatives]
    working_set = fetch_rows(table, ids)
    objective = SampledSoftmaxLoss(LossConfig(), None, LossContext(NUM_ITEMS, 0))

    def loss_of(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        inputs, positives, others = index.split([10, 10, 70])
        outputs = model.encode(rows, inputs, batch, seed=3)
        return objective.loss(outputs, rows, positives, others.view(10, 7), working_set.ids, batch, 0)

    loss = loss_of(working_set.rows, working_set.index)
    loss.sum().backward()

    weight = table.weight.clone().requires_grad_()
    direct = loss_of(weight, torch.cat([piece.flatten() for piece in ids]))
    direct.sum().backward()
    torch.testing.assert_close(loss, direct)
    assert weight.grad is not None and working_set.rows.grad is not None
    torch.testing.assert_close(working_set.rows.grad, weight.grad[working_set.ids], rtol=1e-4, atol=1e-5)
    others = torch.ones(NUM_ITEMS, dtype=torch.bool)
    others[working_set.ids] = False
    assert not weight.grad[others].any()


def test_encoder_returns_unit_vectors_of_the_last_tokens(model: RetrievalModel, table: LocalTable) -> None:
    batch = make_batch([6, 4, 1])
    encoder = TableEncoder(model, table.weight)
    vectors = encoder.encode_last(batch)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    expected = outputs(model, table, batch)[[5, 9, 10]]
    torch.testing.assert_close(vectors, torch.nn.functional.normalize(expected))
    torch.testing.assert_close(encoder.item_rows(3, 9), torch.nn.functional.normalize(table.weight[3:9]))


def test_recomputing_keeps_the_inputs_of_blocks_alone_and_changes_no_gradient(
    model: RetrievalModel, table: LocalTable
) -> None:
    batch = make_batch([6, 0, 4, 12])

    def gradients() -> tuple[int, list[torch.Tensor]]:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        rows = table.weight.detach().clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model.encode(rows, batch.items.values, batch, seed=3)
        return sum(kept.values()), list(torch.autograd.grad(out.sin().sum(), [rows, *model.parameters()]))

    all_kept, expected = gradients()
    model.recompute = True
    inputs_kept, recomputed = gradients()
    assert inputs_kept < all_kept / 2
    assert all(torch.equal(a, b) for a, b in zip(expected, recomputed, strict=True))


def test_a_block_in_plain_pytorch_learns_how_to_compute_in_bf16(
    table: LocalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("hstu")
    block = model.blocks[0]
    monkeypatch.setattr(type(block), "forward", lambda self, x, tokens: x @ self.uvqk[:, :16])
    assert outputs(model, table, make_batch([3])).dtype == torch.float32
    model.precision = "bf16"
    with pytest.raises(UserError, match=r"'hstu' does not compute in bf16: .*write x @ weight\.to\(x\.dtype\)"):
        outputs(model, table, make_batch([3]))
    monkeypatch.setattr(type(block), "forward", lambda self, x, tokens: x @ self.uvqk[:, :16].to(x.dtype))
    assert outputs(model, table, make_batch([3])).dtype == torch.float32
