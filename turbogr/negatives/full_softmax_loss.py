"""Full softmax: cross-entropy of the target among all items."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from turbogr.data.batching import Batch
from turbogr.negatives.loss import Loss
from turbogr.ops import full_softmax
from turbogr.plugins import register


@register("loss", "full-softmax")
class FullSoftmaxLoss(Loss):
    """The cross-entropy of every position's target among all items, by cosines divided by a temperature.

    All items are in every working set, so their rows are read, sent and updated in every step.
    """

    unused_settings: ClassVar[tuple[str, ...]] = (
        *Loss.unused_settings,
        "num_negatives",
        "sampler",
        "popularity_exponent",
        "shares",
        "hard_size",
        "hard_every",
    )

    @property
    def num_scored(self) -> int:
        return self.context.num_items - 1

    def draw(self, batch: Batch, step: int) -> Tensor:
        """Return all items, [V]."""
        return torch.arange(self.context.num_items, dtype=torch.int32, device=batch.events.device)

    def loss(
        self,
        outputs: Tensor,
        rows: Tensor,
        positives: Tensor,
        negatives: Tensor | None,
        ids: Tensor,
        batch: Batch,
        step: int,
    ) -> Tensor:
        """Return the loss of every position, [T]; see `Loss`.

        Rows are taken in the order of the items, so the order of sums does not depend on the number of ranks.
        """
        assert negatives is not None and batch.targets is not None
        return full_softmax(outputs, _select(rows, negatives), batch.targets, temperature=self.config.temperature)


def _select(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[index], without a copy if these rows follow each other."""
    if index.device.type != "cpu":  # looking at the index would wait for the device
        return rows.index_select(0, index)
    first, end = int(index[0]), int(index[0]) + index.numel()
    if not torch.equal(index, torch.arange(first, end, dtype=index.dtype, device=index.device)):
        return rows.index_select(0, index)
    return rows if index.numel() == rows.shape[0] else rows[first:end]
