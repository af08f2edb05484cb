"""The interface of a loss of retrieval: which items a batch needs besides its targets, and the loss of its positions.

Drawing needs ids alone and may happen some steps before the loss, on another thread. Everything is a function of
(config, batch, step), so a loss works on any number of ranks and in any pipeline mode without knowing of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from turbogr.config import Config, LossConfig
from turbogr.data.batching import Batch
from turbogr.errors import UserError
from turbogr.negatives.loss_context import LossContext
from turbogr.negatives.samplers import DrawRequest, make_sampler
from turbogr.plugins import find


class Loss:
    """A loss that scores every position against negatives of the config's sampler: a subclass writes the formula.

    Register one with `@register("loss", name)` to choose it by name. `options` is its own section of the config, None
    if it has none. Users are recommended the items whose vectors have the largest cosine with the output.

    `unused_settings` are keys of the section `loss` that mean nothing to it; setting one is an error.
    """

    unused_settings: ClassVar[tuple[str, ...]] = ("expansion", "sharing", "precision", "segment_mb")

    def __init__(self, config: LossConfig, options: Any, context: LossContext) -> None:
        self.config, self.options, self.context = config, options, context
        self.sampler = make_sampler(config, context)
        defaults = LossConfig()
        for name in self.unused_settings:
            if getattr(config, name) != getattr(defaults, name):
                raise UserError(f"loss.{name} has no effect on the loss '{config.name}'; leave it out")

    @property
    def num_scored(self) -> int:
        """Negatives that a position is scored against, for counting FLOPs."""
        return self.config.num_negatives

    @property
    def needs_step_targets(self) -> bool:
        """Whether drawing needs the targets of the whole step, on every rank."""
        return self.sampler.needs_step_targets

    def draw(self, batch: Batch, step: int) -> Tensor | None:
        """Return the ids that the loss needs besides the targets, [T, num_negatives]; None if it needs no others.

        On any thread, and up to `HARD_DELAY` steps before the step itself.
        """
        assert batch.targets is not None
        request = DrawRequest(batch.events, step, batch.targets[:, None], batch.targets_of_step)
        return self.sampler.draw(request, self.config.num_negatives)

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
        """Return the loss of every position, [T], from its output vector, outputs [T, d].

        `rows` [R, d] are the vectors of the items `ids` [R]. `positives` [T] indexes the rows of the targets;
        `negatives` has the shape of what `draw` returned and indexes the rows of these items.
        """
        raise NotImplementedError

    def is_due(self, step: int) -> bool:
        """Return whether `refresh` must be called before the rows of `step` are updated."""
        return self.sampler.is_due(step)

    def refresh(self, weight: Tensor, step: int) -> None:
        """Derive what is kept between steps from the whole item table, `weight` [V, d]."""
        self.sampler.refresh(weight, step)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint must hold, to be loaded in place; most losses have none."""
        return self.sampler.state()


def make_loss(config: Config, context: LossContext) -> Loss:
    """Build the loss that a config names.

    Raises:
        UserError: there is none of that name, or a setting has no effect on it.
    """
    component = find("loss", config.loss.name)
    context = dataclasses.replace(context, options=config.options)
    loss: Loss = component.factory(config.loss, component.section(config.options), context)
    return loss
