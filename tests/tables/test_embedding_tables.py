"""Several tables in one tensor give what each would give alone."""

from __future__ import annotations

import pytest
import torch

from turbogr.config import OptimizerConfig
from turbogr.tables.embedding_tables import EmbeddingTables, TableSpec
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import TableIds

SPECS = [
    TableSpec("item", 50, 8, "adam", 0.1),
    TableSpec("hour", 24, 4, "adagrad", 0.2),
    TableSpec("rating", 6, 8, "adam", 0.1),
    TableSpec("day", 7, 8, "adam", 0.3),
]


def make_tables(specs: list[TableSpec]) -> EmbeddingTables:
    tables = EmbeddingTables(specs, LocalTable, OptimizerConfig())
    tables.draw(3)
    return tables


def ids(seed: int = 0) -> dict[str, TableIds]:
    random = torch.Generator().manual_seed(seed)
    draw = {spec.name: lambda n=spec.num_rows: torch.randint(0, n, (11,), generator=random) for spec in SPECS}
    return {
        "item": TableIds([draw["item"]()], [draw["item"](), draw["item"]().to(torch.int32).view(11, 1)]),
        "hour": TableIds([draw["hour"](), draw["hour"]()]),  # two features share it
        "rating": TableIds([draw["rating"]()]),
        "day": TableIds([draw["day"]()]),
    }


def test_tables_of_the_same_width_optimiser_and_rate_share_a_tensor() -> None:
    names = [[spec.name for spec in group.specs] for group in make_tables(SPECS).groups]
    assert names == [["item", "rating"], ["hour"], ["day"]]


def test_initial_values_do_not_depend_on_the_other_tables() -> None:
    together = make_tables(SPECS)
    for spec in SPECS:
        assert torch.equal(together.gather(spec.name), make_tables([spec]).gather(spec.name)), spec.name
    assert not torch.equal(together.gather("item")[:6], together.gather("rating"))


def test_look_ups_and_updates_are_those_of_separate_tables() -> None:
    together, needed = make_tables(SPECS), ids()
    alone = {spec.name: make_tables([spec]) for spec in SPECS}
    for step in range(3):
        needed = ids(step)
        sets = together.fetch(needed)
        apart = {name: tables.fetch({name: needed[name]}) for name, tables in alone.items()}
        loss = torch.zeros(())
        losses = {name: torch.zeros(()) for name in alone}
        for name, wanted in needed.items():
            rows, index = sets[name].for_inputs(torch.device("cpu"))
            assert torch.equal(rows[index], together.gather(name)[torch.cat(list(wanted.inputs))])
            loss = loss + rows[index].sin().sum()
            rows, index = apart[name][name].for_inputs(torch.device("cpu"))
            losses[name] = losses[name] + rows[index].sin().sum()
            if wanted.loss:
                rows, index = sets[name].for_loss()
                flat = torch.cat([piece.flatten().long() for piece in wanted.loss])
                assert torch.equal(rows[index], together.gather(name)[flat])
                loss = loss + rows[index].cos().sum()
                rows, index = apart[name][name].for_loss()
                losses[name] = losses[name] + rows[index].cos().sum()
        loss.backward()
        requests = [group.request for group in sets.groups]
        together.update(together.sum_gradients(requests, sets.gradients()), 0.5, together.begin_update())
        for name, tables in alone.items():
            losses[name].backward()
            requests = [group.request for group in apart[name].groups]
            tables.update(tables.sum_gradients(requests, apart[name].gradients()), 0.5, tables.begin_update())
    for name, tables in alone.items():
        assert torch.equal(together.gather(name), tables.gather(name)), name


def test_an_id_beyond_its_table_is_refused_and_never_hits_the_next_table() -> None:
    tables = make_tables(SPECS)
    with pytest.raises(ValueError, match="50"):
        tables.fetch({"item": TableIds([torch.tensor([50])])})
    with pytest.raises(ValueError, match="6"):
        tables.fetch({"rating": TableIds([torch.tensor([6])])})


def test_a_batch_may_need_nothing_of_a_group() -> None:
    tables = make_tables(SPECS)
    sets = tables.fetch({"item": TableIds([torch.tensor([3, 3, 4])])})
    assert [group.rows.shape[0] for group in sets.groups] == [2, 0, 0]


def test_rows_of_a_shared_tensor_have_ids_of_their_own_table() -> None:
    tables = make_tables(SPECS)
    items, ratings = torch.tensor([7, 49, 0]), torch.tensor([5, 2])
    sets = tables.fetch({"item": TableIds([], [items]), "rating": TableIds([ratings])})
    _, index = sets["item"].for_loss()
    assert sets["item"].ids()[index].tolist() == [7, 49, 0]


def test_a_checkpoint_names_every_table_and_loads_in_place() -> None:
    tables = make_tables(SPECS)
    state = tables.state()
    assert state.keys() == {"item", "rating", "hour", "day"}
    assert state["rating"]["weight"].shape == (6, 8) and set(state["rating"]["optimizer"]) == {
        "mean",
        "square",
        "num_steps",
    }
    assert set(state["hour"]["optimizer"]) == {"square"}
    before = tables.gather("item").clone()
    state["rating"]["weight"].fill_(7.0)
    tables.adopt(state)
    assert (tables.gather("rating") == 7.0).all() and torch.equal(tables.gather("item"), before)


def test_rows_may_be_assigned_by_name() -> None:
    tables = make_tables(SPECS)
    items = tables.gather("item").clone()
    tables.assign("rating", torch.ones(4, 8))
    assert (tables.gather("rating")[:4] == 1).all() and not (tables.gather("rating")[4:] == 1).any()
    assert torch.equal(tables.gather("item"), items)
