"""Sampled softmax, the loss of the recipes: cross-entropy of the target among negatives, as a config asks for it.

Positions may share their negatives, and the loss may be computed in segments; see `sharing.py` and `offload.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from turbogr.config import LossConfig
from turbogr.data.batching import Batch
from turbogr.negatives.loss import Loss
from turbogr.negatives.loss_context import LossContext
from turbogr.negatives.offload import segmented_softmax
from turbogr.negatives.samplers import DrawRequest, log_probabilities
from turbogr.negatives.sharing import (
    SharedNegatives,
    choose_others,
    group_anchors,
    group_offsets,
    reused_logits_loss,
    sharing_seed,
)
from turbogr.ops import sampled_softmax
from turbogr.plugins import register
from turbogr.streams import upload


@register("loss", "sampled-softmax")
class SampledSoftmaxLoss(Loss):
    """The cross-entropy of every position's target among its negatives, by cosines divided by a temperature.

    Logits are corrected by `log_q`, the log probability with which the sampler draws an item.
    """

    unused_settings = ()

    def __init__(self, config: LossConfig, options: Any, context: LossContext) -> None:
        super().__init__(config, options, context)
        shared = config.expansion if config.sharing == "group" else 1
        self.num_drawn = config.num_negatives * shared
        self.log_q = log_probabilities(self.sampler, self.num_drawn)
        self._log_q_there: Tensor | None = None

    @property
    def num_scored(self) -> int:
        return self.config.num_scored

    def draw(self, batch: Batch, step: int) -> Tensor:
        """Return the negatives of a batch, int32: [T, R], or [G, k·R] of groups of positions."""
        assert batch.targets is not None
        keys, targets = batch.events, batch.targets[:, None]
        groups = self._groups(batch.items.offsets)
        if groups is not None:
            keys = keys[groups[:-1]]
            targets = group_anchors(groups, self.config.expansion, batch.targets)
        return self.sampler.draw(DrawRequest(keys, step, targets, batch.targets_of_step), self.num_drawn)

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

        Rows, indices and ids may be in host memory beside outputs on an accelerator, where the loss is computed in
        segments.
        """
        assert negatives is not None
        config = self.config
        near = batch if batch.items.offsets.device == rows.device else batch.at_hand
        offsets, keys = near.items.offsets, near.events
        groups = self._groups(batch.at_hand.items.offsets)
        groups = None if groups is None else upload(groups, rows.device)
        counted: Tensor | SharedNegatives = negatives
        log_q = self._log_q_of(ids)
        if config.expansion > 1 and groups is None:
            seed, more = sharing_seed(self.context.seed, step), (config.expansion - 1) * config.num_negatives
            if config.sharing == "logits":
                chosen = choose_others(offsets, keys, config.num_negatives, more, seed)
                return reused_logits_loss(
                    outputs,
                    rows,
                    positives,
                    negatives,
                    chosen,
                    temperature=config.temperature,
                    log_q=log_q,
                    precision=config.precision,
                )
            if config.sharing == "batch":
                offsets = offsets[[0, -1]]  # as if the batch were one sequence
            counted = SharedNegatives(negatives, positives, offsets, keys, more, seed)
        score: Callable[..., Tensor] = sampled_softmax
        if config.segment_mb is not None:
            score = partial(segmented_softmax, budget_bytes=config.segment_mb * 1e6)
        return score(
            outputs,
            rows,
            positives,
            counted if config.segment_mb is not None else counted[:],
            temperature=config.temperature,
            log_q=log_q,
            groups=groups,
            precision=config.precision,
        )

    def _log_q_of(self, ids: Tensor) -> Tensor | None:
        """Return `log_q` of items; the whole vector is copied to their device once."""
        if self.log_q is None:
            return None
        if self._log_q_there is None or self._log_q_there.device != ids.device:
            self._log_q_there = self.log_q.to(ids.device)
        return self._log_q_there.index_select(0, ids)

    def _groups(self, offsets: Tensor) -> Tensor | None:
        if self.config.sharing != "group" or self.config.expansion == 1:
            return None
        return group_offsets(offsets, self.config.expansion)
