from __future__ import annotations

import pytest
import torch

from turbogr import random
from turbogr.ops import random_integers


@pytest.mark.parametrize("bound", [1, 2, 3706, 2**31 - 1])
@pytest.mark.parametrize("num_columns", [0, 1, 7, 128])
def test_every_backend_draws_the_same(bound: int, num_columns: int) -> None:
    keys = torch.cat([torch.arange(-3, 40), torch.tensor([2**62, -(2**62), 2**32, 2**32 + 1])])
    for seed in (0, 1, 2**62 + 12345):
        drawn = random_integers(keys, seed, num_columns, bound)
        assert drawn.dtype == torch.int32
        assert torch.equal(drawn, random.random_integers(keys, seed, num_columns, bound))


def test_a_key_gets_the_same_numbers_whatever_the_other_keys_are() -> None:
    keys = torch.arange(100)
    together = random_integers(keys, 5, 9, 1000)
    assert torch.equal(together[40:60], random_integers(keys[40:60], 5, 9, 1000))
    assert torch.equal(together[::2], random_integers(keys[::2], 5, 9, 1000))


@pytest.mark.parametrize("bound", [0, -1, 2**31])
def test_a_bound_out_of_range_is_refused(bound: int) -> None:
    with pytest.raises(ValueError, match="bound must be between 1 and"):
        random_integers(torch.arange(3), 0, 2, bound)


def test_keys_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="keys must be int64"):
        random_integers(torch.arange(3, dtype=torch.int32), 0, 2, 5)
