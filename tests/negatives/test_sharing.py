"""Sharing: who sees whose negatives, and the loss of every form against its definition, position by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.negatives.batches import make_batch
from turbogr.config import HARD_DELAY, LossConfig
from turbogr.data.batching import Batch
from turbogr.negatives import LossContext
from turbogr.negatives.sampled_softmax_loss import SampledSoftmaxLoss
from turbogr.negatives.sharing import choose_others, group_anchors, group_offsets, sharing_seed, with_others
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import fetch_rows

NUM_ITEMS, WIDTH = 30, 12
LENGTHS = [7, 1, 4, 2]


@pytest.mark.parametrize(
    ("lengths", "size", "wanted"),
    [
        ([5, 1, 4], 2, [0, 2, 4, 5, 6, 8, 10]),
        ([3], 4, [0, 3]),
        ([0, 3, 0], 2, [0, 2, 3]),
        ([], 2, [0]),
        ([2, 2], 1, [0, 1, 2, 3, 4]),
    ],
)
def test_groups_stay_within_sequences(lengths: list[int], size: int, wanted: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    assert group_offsets(offsets, size).tolist() == wanted


def test_anchors_take_turns_in_a_small_group() -> None:
    assert group_anchors(torch.tensor([0, 3, 4]), 3, torch.tensor([5, 6, 7, 8])).tolist() == [[5, 6, 7], [8, 8, 8]]


def test_others_are_of_the_same_sequence_and_never_ones_own() -> None:
    offsets = torch.tensor([0, 6, 7, 10])
    chosen = choose_others(offsets, torch.arange(10) + 50, 4, 4000, seed=3)
    sequence = torch.tensor([0] * 6 + [1] + [2] * 3)
    for position in range(10):
        if position == 6:
            assert (chosen[position] == -1).all()
            continue
        owners = chosen[position] // 4
        assert (sequence[owners] == sequence[position]).all() and (owners != position).all()
        counts = np.bincount(chosen[position].numpy())
        counts = counts[counts > 0]
        others = (5 if position < 6 else 2) * 4
        assert len(counts) == others
        assert ((counts - 4000 / others) ** 2 / (4000 / others)).sum() < others + 5 * np.sqrt(2 * others)
    assert not torch.equal(chosen[0] % 4, chosen[1] % 4), "each position has its own shuffle"


def test_what_is_missing_becomes_the_positive() -> None:
    negatives, positives = torch.tensor([[1, 2], [3, 4]]), torch.tensor([8, 9])
    chosen = torch.tensor([[2, 3], [-1, -1]])
    assert with_others(negatives, positives, chosen).tolist() == [[1, 2, 3, 4], [3, 4, 9, 9]]


def rounded(items: torch.Tensor, precision: str) -> torch.Tensor:
    if precision == "int8":
        scale = items.abs().max(dim=1, keepdim=True).values / 127
        return (items / scale).round() * scale
    return items.half().float() if precision == "fp16" else items


def definition(
    objective: SampledSoftmaxLoss, outputs: torch.Tensor, weight: torch.Tensor, batch: Batch, step: int
) -> torch.Tensor:
    """The loss position by position, with loops, in the precision of its inputs."""
    config = objective.config
    assert batch.targets is not None
    targets, offsets = batch.targets, batch.items.offsets
    drawn = objective.draw(batch, step).long()
    queries = torch.nn.functional.normalize(outputs, dim=1, eps=1e-6)
    items = torch.nn.functional.normalize(weight, dim=1, eps=1e-6)
    narrow = items + (rounded(items.detach().float(), config.precision).to(items.dtype) - items).detach()
    bias = torch.zeros(len(items)) if objective.log_q is None else objective.log_q

    def logit(query: int, item: int, table: torch.Tensor) -> torch.Tensor:
        return queries[query] @ table[item] / config.temperature - bias[item]

    more = (config.expansion - 1) * config.num_negatives
    groups = objective._groups(batch.items.offsets)
    chosen = None
    if groups is None and more:
        within = offsets[[0, -1]] if config.sharing == "batch" else offsets
        chosen = choose_others(
            within, batch.events, config.num_negatives, more, sharing_seed(objective.context.seed, step)
        )
    losses = []
    for t in range(len(targets)):
        row = t if groups is None else int(torch.searchsorted(groups, t, right=True)) - 1
        pairs = [(t, int(item)) for item in drawn[row]]
        if chosen is not None:
            for place in chosen[t].tolist():
                if place >= 0:
                    owner = place // config.num_negatives
                    pairs.append((owner if config.sharing == "logits" else t, int(drawn.flatten()[place])))
        own = logit(t, int(targets[t]), items)
        others = [logit(query, item, narrow) for query, item in pairs if item != int(targets[t])]
        losses.append(torch.logsumexp(torch.stack([own, *others]), 0) - own)
    return torch.stack(losses)


HARD = {"sampler": "mixture", "shares": (0.2, 0.4, 0.2, 0.2), "hard_size": 3}
SAMPLERS: list[dict[str, object]] = [*({"sampler": name} for name in ("uniform", "popularity", "in-batch")), HARD]
COMBINATIONS = [
    {"sharing": sharing, "expansion": expansion, "precision": precision, "segment_mb": segment_mb, **sampler}
    for sharing, expansion in (("group", 1), ("group", 3), ("positions", 3), ("batch", 3), ("logits", 2))
    for precision in ("fp32", "fp16", "int8")
    for segment_mb in (None, 3e-4)
    for sampler in SAMPLERS
    if not (sharing == "logits" and segment_mb)
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(str(o[key]) for key in list(o)[:5]))
def test_every_combination_has_the_loss_and_gradients_of_its_definition(options: dict[str, object]) -> None:
    config = LossConfig(num_negatives=5, **options)  # type: ignore[arg-type]
    config.check()
    objective = SampledSoftmaxLoss(config, None, LossContext(NUM_ITEMS, 1, lambda: np.arange(NUM_ITEMS) ** 2))
    batch = make_batch(LENGTHS, NUM_ITEMS)
    random = torch.Generator().manual_seed(4)
    outputs = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64, generator=random)
    table = LocalTable(NUM_ITEMS, WIDTH)
    table.weight = torch.randn(NUM_ITEMS, WIDTH, generator=random)
    weights = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=random)

    objective.refresh(table.weight, 0)
    step = HARD_DELAY + 2  # draws from the lists just made

    assert batch.targets is not None
    drawn = objective.draw(batch, step)
    fetched = fetch_rows(table, [batch.targets, drawn])
    positives, negatives = fetched.index[: sum(LENGTHS)], fetched.index[sum(LENGTHS) :].view(drawn.shape)
    single = outputs.float().requires_grad_()
    loss = objective.loss(single, fetched.rows, positives, negatives, fetched.ids, batch, step)
    loss.backward(weights.float())

    exact_outputs, exact_weight = outputs.clone().requires_grad_(), table.weight.double().requires_grad_()
    exact = definition(objective, exact_outputs, exact_weight, batch, step)
    exact.backward(weights)
    assert single.grad is not None and fetched.rows.grad is not None
    assert exact_outputs.grad is not None and exact_weight.grad is not None
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if options["precision"] == "fp32" else {"rtol": 5e-3, "atol": 5e-3}
    torch.testing.assert_close(loss.double(), exact, **tolerance)
    torch.testing.assert_close(single.grad.double(), exact_outputs.grad, **tolerance)
    torch.testing.assert_close(fetched.rows.grad.double(), exact_weight.grad[fetched.ids], **tolerance)
