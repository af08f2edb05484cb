"""Where the tokens of a ranking model stand, and what each one sees.

A sequence is one token for the user, a token per event of the history (the item with what the user did), and a token
per query (an item without actions, which are to be predicted). History is causal. A query sees the user, the first so
many events of the history, and itself: no other query. So one pass predicts the actions of every event from what was
known before it, and of any number of candidates from one history.

Shape legend: B sequences, T events and candidates that have vectors, S tokens of all sequences, N queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.jagged import Jagged
from turbogr.ops import KeyRanges


class RankingLayout(NamedTuple):
    """`history` and `queries` [N] are indices into the T vectors. `order` [S] takes the tokens from the vectors of the
    B users, of the history, and of the queries, one behind the other. `offsets` [B + 1] and `visible` are those of the
    sequences; `query_rows` [N] is where the queries stand in them, and `query_users` [N] whose they are.
    """

    history: Tensor
    queries: Tensor
    order: Tensor
    offsets: Tensor
    visible: KeyRanges
    query_rows: Tensor
    query_users: Tensor

    def to(self, device: torch.device) -> RankingLayout:
        if self.order.device == device:
            return self
        visible = KeyRanges(self.visible.first.to(device), self.visible.last.to(device))
        moved = {name: part.to(device) for name, part in self._asdict().items() if isinstance(part, Tensor)}
        return RankingLayout(**moved, visible=visible)


def ranking_layout(events: Jagged, is_history: Tensor, is_query: Tensor, sees: Tensor) -> RankingLayout:
    """Lay out sequences of events and candidates.

    Args:
        events: Jagged of T values, of which only the offsets count.
        is_history, is_query: [T] bool; an event may be both, or neither.
        sees: [T] int64, how many of its sequence's history tokens a query sees, the earliest ones.
    """
    num_users = events.num_rows
    user = torch.arange(num_users).repeat_interleave(events.lengths)
    history, queries = is_history.nonzero().flatten(), is_query.nonzero().flatten()
    users = torch.cat([torch.arange(num_users), user[history], user[queries]])
    kinds = torch.repeat_interleave(torch.arange(3), torch.tensor([num_users, len(history), len(queries)]))
    order = torch.argsort(users * 3 + kinds, stable=True)
    offsets = torch.zeros(num_users + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(users, minlength=num_users), 0, out=offsets[1:])
    own = users[order]
    position = torch.arange(len(order)) - offsets[:-1][own]
    query_rows = (kinds[order] == 2).nonzero().flatten()
    last = position + 1
    last[query_rows] = 1 + sees[queries]
    visible = KeyRanges(torch.zeros_like(last), last)
    return RankingLayout(history, queries, order, offsets, visible, query_rows, user[queries])


def every_event(events: Jagged, times: Tensor, delay: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Every event is a query that sees the events at earlier times: `is_history`, `is_query`, `sees`.

    The last event of a sequence is no history, as nobody sees it.
    """
    is_query = torch.ones(events.num_values, dtype=torch.bool)
    is_history = is_query.clone()
    is_history[events.offsets[1:][events.lengths > 0] - 1] = False
    return is_history, is_query, earlier_events(events, times, delay)


def last_events(events: Jagged, times: Tensor, num_candidates: int, delay: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The last events of every sequence are candidates, which see the history at earlier times and not each other."""
    lengths = events.lengths.repeat_interleave(events.lengths)
    history = (lengths - num_candidates).clamp(min=0)
    is_query = events.positions() >= history
    return ~is_query, is_query, torch.minimum(history, earlier_events(events, times, delay))


def earlier_events(events: Jagged, times: Tensor, delay: int = 0) -> Tensor:
    """Return how many events of its sequence are more than `delay` seconds before each event, [T].

    Those of the same second are not. Times of a sequence do not fall.
    """
    if not events.num_values:
        return events.positions()
    first, last = int(times.min()), int(times.max())
    starts = events.row_index() * (last - first + 1)
    until = (times - delay - first).clamp(min=0)
    return torch.searchsorted(starts + times - first, starts + until) - events.offsets[events.row_index()]
