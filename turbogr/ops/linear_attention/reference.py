"""The definition of linear attention in plain PyTorch: all pairs of a sequence, one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from turbogr.ops.registry import REFERENCE
from turbogr.streams import host_ints

BACKEND = REFERENCE


def retention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, decay: Tensor) -> Tensor:
    """See `turbogr.ops.linear_attention.retention`."""
    rows = []
    for start, stop in pairwise(host_ints(offsets)):
        q_hnd, k_hnd, v_hne = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        place = torch.arange(stop - start, device=q.device)
        distance = (place[:, None] - place[None, :]).clamp(min=0) + 1
        weights = torch.exp(-decay[:, None, None] * distance)
        scores = torch.tril(q_hnd @ k_hnd.transpose(1, 2) * weights)
        rows.append((scores @ v_hne).transpose(0, 1))
    return torch.cat(rows) if rows else v.new_zeros(v.shape)


def periodic_attention(
    v: Tensor, query_turns: Tensor, key_turns: Tensor, gaps: Tensor, log_decay: Tensor, offsets: Tensor
) -> Tensor:
    """See `turbogr.ops.linear_attention.periodic_attention`."""
    rows = []
    for start, stop in pairwise(host_ints(offsets)):
        v_hne = v[start:stop].transpose(0, 1)
        query_sine, query_cosine, sine, cosine = (
            turns[start:stop, :, part].T for turns in (query_turns, key_turns) for part in (0, 1)
        )
        along, across = (
            query_cosine[:, :, None] * cosine[:, None] + query_sine[:, :, None] * sine[:, None],
            query_sine[:, :, None] * cosine[:, None] - query_cosine[:, :, None] * sine[:, None],
        )
        # In double precision: a difference of long sums of gaps, each of which may be years.
        passed = gaps[start:stop].T.double().cumsum(1)
        before = passed - gaps[start:stop].T.double()
        between = (passed[:, :, None] - before[:, None, :]).clamp(min=0).to(log_decay.dtype)
        decay = torch.tril(torch.exp(log_decay[:, None, None] * between))
        weights = torch.cat([across * decay, along * decay])
        rows.append((weights @ v_hne).transpose(0, 1))
    return torch.cat(rows) if rows else v.new_zeros(v.shape)
