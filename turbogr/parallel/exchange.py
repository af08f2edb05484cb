"""Messages of any lengths between all ranks of a process group, both directions of a link busy at once.

gloo moves a long message between two ranks in one direction and then in the other, also in an all-to-all, which takes
twice as long as a full-duplex link needs. Pieces that go and come in turns fill both. Other backends have an all-to-all
of their own that does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

_PIECE_BYTES = 4 << 20


class _Pieces:
    """Messages that are under way together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_exchange(received: Tensor, sent: Tensor, coming: list[int], going: list[int], ranks: Any) -> Any:
    """Begin to send rows of `sent`, `going` [N] of them to every rank of a process group, and to fill `received` with
    `coming` [N] from each; return what to `wait` for before either is touched.

    Both tensors are contiguous, and all ranks call it in the same order.
    """
    if sent.device.type != "cpu":
        return dist.all_to_all_single(received, sent, coming, going, group=ranks, async_op=True)
    rank, size = dist.get_rank(ranks), dist.get_world_size(ranks)
    inward, outward = received.split(coming), sent.split(going)
    inward[rank].copy_(outward[rank])
    works = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        come, go = _pieces(inward[source]), _pieces(outward[target])
        for number in range(max(len(come), len(go))):
            works += [dist.irecv(piece, group=ranks, group_src=source) for piece in come[number : number + 1]]
            works += [dist.isend(piece, group=ranks, group_dst=target) for piece in go[number : number + 1]]
    return _Pieces(works)


def _pieces(rows: Tensor) -> Sequence[Tensor]:
    """Cut rows into pieces of a suitable length; none of no rows."""
    if not rows.numel():
        return ()
    row_bytes = rows[0].numel() * rows.element_size()
    pieces: Sequence[Tensor] = rows.split(max(1, _PIECE_BYTES // row_bytes))
    return pieces
