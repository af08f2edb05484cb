from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr.parallel.row_sharding import RowSharding
from turbogr.tables.table import draw_rows


@given(num_rows=st.integers(1, 5000), num_members=st.integers(1, 17))
def test_every_row_has_one_owner_and_one_slot(num_rows: int, num_members: int) -> None:
    sharding = RowSharding(num_rows, num_members)
    shards = [sharding.rows_of(member) for member in range(num_members)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(num_rows))
    sizes = [len(shard) for shard in shards]
    assert sizes == [sharding.shard_size(member) for member in range(num_members)]
    assert max(sizes) - min(sizes) <= 1
    bounds = sharding.bounds()
    for member, rows in enumerate(shards):
        assert torch.equal(sharding.shuffled(rows) - bounds[member], torch.arange(len(rows)))
        assert (sharding.owners(rows) == member).all()
    in_row_order = sharding.row_order_bounds()
    chunks = torch.arange(num_rows).chunk(num_members)
    assert [len(chunk) for chunk in chunks] == [b - a for a, b in pairwise(in_row_order) if b > a]


def test_one_member_keeps_the_order_of_rows() -> None:
    assert torch.equal(RowSharding(100, 1).shuffled(torch.arange(100)), torch.arange(100))


@pytest.mark.parametrize("num_members", [2, 3, 8, 16])
@pytest.mark.parametrize("num_rows", [4096, 65_536, 99_991, 1_000_000])
@pytest.mark.parametrize("popularity", ["falling", "blocks", "every eighth"])
def test_hot_rows_spread_over_the_members(num_members: int, num_rows: int, popularity: str) -> None:
    """Each member gets its share of the hottest rows within a third, however popularity is laid out over the rows."""
    num_hot = 48 * num_members
    hot = {
        "falling": np.arange(num_hot),
        "blocks": np.concatenate([np.arange(num_hot // 2), num_rows // 2 + np.arange(num_hot // 2)]),
        "every eighth": 8 * np.arange(num_hot),
    }[popularity]
    owners = RowSharding(num_rows, num_members).owners(torch.from_numpy(hot))
    counts = owners.bincount(minlength=num_members)
    assert counts.max() <= 64 and counts.min() >= 32, counts


def test_initial_rows_are_the_same_in_every_sharding() -> None:
    whole = torch.empty(1001, 24)
    draw_rows(whole, torch.arange(1001), 7)
    for num_members in (2, 3, 8):
        for member in range(num_members):
            rows = RowSharding(1001, num_members).rows_of(member)
            shard = torch.empty(len(rows), 24)
            draw_rows(shard, rows, 7)
            assert torch.equal(shard, whole[rows])


def test_initial_rows_are_normal_and_differ_by_seed() -> None:
    values = torch.empty(5000, 64)
    draw_rows(values, torch.arange(5000), 3)
    assert values.mean().abs() < 2e-4
    assert abs(values.std() - 0.02) < 1e-4
    beyond = {0.02: 0.3173, 0.04: 0.0455, 0.06: 0.0027}
    for limit, share in beyond.items():
        assert float((values.abs() > limit).float().mean()) == pytest.approx(share, rel=0.1)
    assert values.isfinite().all()
    other = torch.empty_like(values)
    draw_rows(other, torch.arange(5000), 4)
    assert (values == other).float().mean() < 0.01
