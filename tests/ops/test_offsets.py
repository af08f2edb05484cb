"""Offsets that do not describe the values are refused by every jagged operator, whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turbogr.ops import RelativeBias, fuxi_attention, hstu_attention, softmax_attention

NUM_TOKENS, MAX_LEN = 9, 6


def _bias() -> RelativeBias:
    times = torch.arange(NUM_TOKENS)
    return RelativeBias(times, times, torch.zeros(2 * MAX_LEN - 1), torch.zeros(3))


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hstu": lambda x, offsets: hstu_attention(x, x, x, offsets, _bias(), max_len=MAX_LEN),
    "fuxi": lambda x, offsets: fuxi_attention(x, x, x, offsets, _bias(), max_len=MAX_LEN),
    "softmax": lambda x, offsets: softmax_attention(x, x, x, offsets, scale=1.0, max_len=MAX_LEN),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
@settings(deadline=None, max_examples=80)
@given(offsets=st.lists(st.integers(-2, NUM_TOKENS + 2), min_size=0, max_size=8), sort=st.booleans())
def test_any_offsets_are_either_sound_or_refused(
    operator: Callable[[Tensor, Tensor], Tensor], offsets: list[int], sort: bool
) -> None:
    if sort:  # mostly sound offsets, so that both outcomes are common
        offsets = [0, *sorted(offsets), NUM_TOKENS]
    x = torch.ones(NUM_TOKENS, 1, 2)
    lengths = [b - a for a, b in pairwise(offsets)]
    ends_fit = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == NUM_TOKENS
    sound = ends_fit and all(0 <= n <= MAX_LEN for n in lengths)
    tensor = torch.tensor(offsets, dtype=torch.int64)
    if sound:
        assert bool(operator(x, tensor).isfinite().all())
    else:
        with pytest.raises(ValueError):
            operator(x, tensor)
