"""The vectors of all input ids: one look-up for all tables of a group equals one look-up per table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.config import OptimizerConfig
from turbogr.tables.embedding_tables import EmbeddingTables, TableSpec
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import TableIds

# The first three share a tensor, and the last has one of its own.
SPECS = [TableSpec("item", 90, 12), TableSpec("tag", 40, 12), TableSpec("rating", 6, 12), TableSpec("city", 30, 5)]


@pytest.fixture
def tables() -> EmbeddingTables:
    tables = EmbeddingTables(SPECS, LocalTable, OptimizerConfig())
    tables.draw(3)
    return tables


def draw_ids(counts: dict[str, list[int]], *, loss: int = 0) -> dict[str, TableIds]:
    """Draw inputs with these numbers of ids for each table, and ids of the loss for the items."""
    random = torch.Generator().manual_seed(0)
    num_rows = {spec.name: spec.num_rows for spec in SPECS}

    def draw(name: str, count: int) -> Tensor:
        return torch.randint(0, num_rows[name], (count,), generator=random)

    return {
        name: TableIds([draw(name, count) for count in pieces], [draw(name, loss)] if loss and name == "item" else [])
        for name, pieces in counts.items()
    }


def test_features_that_share_a_table_and_tables_that_share_a_tensor(tables: EmbeddingTables) -> None:
    """Vectors bit for bit, gradients to rounding; three features look into `tag`."""
    ids = draw_ids({"rating": [50], "city": [50, 20], "item": [200], "tag": [50, 0, 70]}, loss=40)
    sets = tables.fetch(ids)
    vectors = sets.look_up_inputs(ids, torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    grads = {name: [torch.randn(v.shape, generator=random) for v in pieces] for name, pieces in vectors.items()}
    torch.autograd.backward(
        [v for pieces in vectors.values() for v in pieces], [g for pieces in grads.values() for g in pieces]
    )
    summed = tables.sum_gradients([group.request for group in sets.groups], sets.gradients())
    whole = [torch.zeros_like(w).index_copy_(0, r.slots, r.grad) for w, r in zip(tables.weights, summed, strict=True)]
    first = {"item": (0, 0), "tag": (0, 90), "rating": (0, 130), "city": (1, 0)}
    for spec in SPECS:
        weight = tables.gather(spec.name).clone().requires_grad_()
        expected = [F.embedding(piece, weight) for piece in ids[spec.name].inputs]
        assert len(vectors[spec.name]) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(vectors[spec.name], expected, strict=True))
        torch.autograd.backward(expected, grads[spec.name])
        group, row = first[spec.name]
        torch.testing.assert_close(whole[group][row : row + spec.num_rows], weight.grad)


def test_a_batch_may_leave_tables_out(tables: EmbeddingTables) -> None:
    vectors = tables.fetch(draw_ids({"tag": [7]})).look_up_inputs(["tag"], torch.device("cpu"))
    assert vectors.keys() == {"tag"}
    assert vectors["tag"][0].shape == (7, 12)
