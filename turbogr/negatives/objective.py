"""The training objective: which negatives a batch draws, and the loss of its positions against them.

Drawing needs ids alone and may happen some steps before the loss; everything is a function of (config, batch, step),
and of lists of hard negatives that are made from the item table now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from turbogr.config import LossConfig
from turbogr.data.batching import Batch
from turbogr.layers.item_table import Table
from turbogr.negatives.hard import HardCache
from turbogr.negatives.offload import segmented_softmax
from turbogr.negatives.samplers import Counts, Request, log_probabilities, make_sampler
from turbogr.negatives.sharing import (
    SharedNegatives,
    choose_others,
    group_anchors,
    group_offsets,
    reused_logits_loss,
    sharing_seed,
)
from turbogr.ops import sampled_softmax


class Objective:
    """Sampled softmax as a config asks for it; without `counts` all items count as equally popular."""

    def __init__(self, config: LossConfig, num_items: int, seed: int, counts: Counts | None = None) -> None:
        self.config, self.seed = config, seed
        self.cache = HardCache(num_items, config.hard_size, config.hard_every, seed) if config.has_hard() else None
        equal: Counts = lambda: np.ones(num_items, np.int64)  # noqa: E731
        self.sampler = make_sampler(config, num_items, seed, counts or equal, self.cache)
        shared = config.expansion if config.sharing == "group" else 1
        self.num_drawn = config.num_negatives * shared
        self.log_q = log_probabilities(self.sampler, self.num_drawn)

    def is_due(self, step: int) -> bool:
        """Whether `refresh` must be called before the rows of `step` are changed."""
        return self.cache is not None and self.cache.is_due(step)

    def refresh(self, table: Table, step: int) -> None:
        """Make the lists of hard negatives anew; with many ranks, a collective call."""
        if self.cache is not None:
            self.cache.refresh(table.gathered().weight, step)

    def draw(self, batch: Batch, step: int) -> Tensor:
        """Return the negatives of a batch, int32: [T, R], or [G, k·R] of groups.

        On any thread, and up to `HARD_DELAY` steps before the step itself.
        """
        assert batch.targets is not None
        keys, anchors = batch.events, batch.targets[:, None]
        groups = self._groups(batch.items.offsets)
        if groups is not None:
            keys = keys[groups[:-1]]
            anchors = group_anchors(groups, self.config.expansion, batch.targets)
        return self.sampler.draw(Request(keys, step, anchors, batch.targets_of_step), self.num_drawn)

    def loss(self, outputs: Tensor, rows: Tensor, index: Tensor, ids: Tensor, batch: Batch, step: int) -> Tensor:
        """Return the loss of every position, [T], from its output vector [T, d].

        `rows` [R, d] are the vectors of the items `ids` [R], and `index` places the targets [T] and what `draw`
        returned, laid flat, in them. These three may be in host memory beside outputs on an accelerator, where the loss
        is computed in segments.
        """
        config, num_tokens = self.config, batch.num_tokens
        positives, negatives = index[:num_tokens], index[num_tokens:]
        offsets, keys = batch.items.offsets.to(ids.device), batch.events.to(ids.device)
        groups = self._groups(offsets)
        negatives = negatives.view(num_tokens if groups is None else groups.numel() - 1, -1)
        counted: Tensor | SharedNegatives = negatives
        log_q = None if self.log_q is None else self.log_q.to(ids.device).index_select(0, ids)
        if config.expansion > 1 and groups is None:
            seed, more = sharing_seed(self.seed, step), (config.expansion - 1) * config.num_negatives
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

    def _groups(self, offsets: Tensor) -> Tensor | None:
        if self.config.sharing != "group" or self.config.expansion == 1:
            return None
        return group_offsets(offsets, self.config.expansion)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must hold; most objectives have none."""
        return {} if self.cache is None else self.cache.state()
