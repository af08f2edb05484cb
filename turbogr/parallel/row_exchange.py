"""An all-to-all of rows, with any number of rows per rank, that uses both directions of a link at once.

gloo sends a long message between two ranks first in one direction and then in the other, also in its all-to-all. On a
full-duplex link that takes twice as long as needed. So messages are cut into pieces, and sends alternate with receives.
Other backends' own all-to-all does not have this problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from turbogr.parallel.collective_issuer import issue

_PIECE_BYTES = 4 << 20


class _PendingMessages:
    """Messages that are being sent and received."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_exchange(received: Tensor, sent: Tensor, num_received: list[int], num_sent: list[int], ranks: Any) -> Any:
    """Start an all-to-all of rows between the N ranks of the process group `ranks`.

    Rank r gets the next `num_sent[r]` rows of `sent`; the next `num_received[r]` rows of `received` are filled by rank
    r. Returns a handle: call `wait()` on it before either tensor is read or changed. Both tensors are contiguous, and
    all ranks call it in the same order.
    """
    if sent.device.type != "cpu":
        return issue(
            sent.device,
            lambda: dist.all_to_all_single(received, sent, num_received, num_sent, group=ranks, async_op=True),
        )
    rank, size = dist.get_rank(ranks), dist.get_world_size(ranks)
    incoming, outgoing = received.split(num_received), sent.split(num_sent)
    incoming[rank].copy_(outgoing[rank])
    works = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        receives, sends = _pieces(incoming[source]), _pieces(outgoing[target])
        for number in range(max(len(receives), len(sends))):
            works += [dist.irecv(piece, group=ranks, group_src=source) for piece in receives[number : number + 1]]
            works += [dist.isend(piece, group=ranks, group_dst=target) for piece in sends[number : number + 1]]
    return _PendingMessages(works)


def _pieces(rows: Tensor) -> Sequence[Tensor]:
    """Cut rows into pieces of about `_PIECE_BYTES`; no rows give no pieces."""

    if not rows.numel():
        return ()
    row_bytes = rows[0].numel() * rows.element_size()
    pieces: Sequence[Tensor] = rows.split(max(1, _PIECE_BYTES // row_bytes))
    return pieces
