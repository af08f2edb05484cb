from __future__ import annotations

from pathlib import Path

import pytest

from turbogr.config import ParallelConfig, load_config
from turbogr.errors import UserError
from turbogr.parallel.mesh import choose_mesh

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "local_size", "table", "memory", "mesh"),
    [
        (1, 1, 0, 0, (1, 1)),
        (4, 4, GIB, GIB, (1, 4)),
        (16, 8, GIB, 8 * GIB, (2, 8)),
        (16, 8, 40 * GIB, 8 * GIB, (1, 16)),  # beyond half of one machine's memory
        (32, 8, 40 * GIB, 8 * GIB, (2, 16)),
        (32, 8, 10**15, 8 * GIB, (1, 32)),
        (32, 8, 10**15, 0, (4, 8)),  # memory unknown
        (6, 4, GIB, GIB, (1, 6)),
    ],
)
def test_the_mesh_follows_from_the_topology(
    size: int, local_size: int, table: int, memory: int, mesh: tuple[int, int]
) -> None:
    found = choose_mesh(size, local_size, table_bytes=table, rank_memory=memory)
    assert found[:2] == mesh and found.reason


@pytest.mark.parametrize(
    ("groups", "members", "mesh"), [(2, None, (2, 4)), (None, 2, (4, 2)), (8, 1, (8, 1)), (1, None, (1, 8))]
)
def test_the_config_decides(groups: int | None, members: int | None, mesh: tuple[int, int]) -> None:
    assert choose_mesh(8, 4, groups=groups, members=members)[:2] == mesh


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel\.groups is 3, which does not divide 8 ranks.*1, 2, 4, 8"):
        choose_mesh(8, 8, groups=3)
    with pytest.raises(UserError, match=r"parallel\.groups 2 × parallel\.members 2 is 4, but there are 8 ranks"):
        choose_mesh(8, 8, groups=2, members=2)


def test_a_recipe_may_say_auto(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("parallel: auto\n")
    assert load_config(recipe).parallel == ParallelConfig()
    assert load_config(recipe, ["parallel.groups=2"]).parallel.groups == 2
    recipe.write_text("parallel:\n  group: 2\n")
    with pytest.raises(UserError, match=r"unknown key 'group'.*Did you mean 'groups'"):
        load_config(recipe)
