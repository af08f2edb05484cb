"""Binary cross-entropy of the target and of each negative, plain (BCE) and calibrated (gBCE).

gBCE is the loss of gSASRec (Petrov and Macdonald, "gSASRec: Reducing Overconfidence in Sequential Recommendation
Trained with Negative Sampling", RecSys 2023). Few of all items are negatives, so a model trained with BCE overestimates
the probability of the target. gBCE raises that probability to a power beta, which follows from the share of items that
are negatives and from how much of the effect is to be corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.data.batching import Batch
from turbogr.errors import UserError
from turbogr.negatives.loss import Loss
from turbogr.ops import sampled_logits
from turbogr.plugins import register


def binary_cross_entropy(logits: Tensor, ignored: Tensor, beta: float = 1.0) -> Tensor:
    """Return the loss of every position, [T]: -(beta log s(l_0) + sum_j log(1 - s(l_j))) / (1 + n), s the sigmoid.

    logits [T, 1 + n] have the target's first; `ignored` [T, n] are negatives that do not count.
    """
    own, others = F.softplus(-logits[:, 0]), F.softplus(logits[:, 1:])
    return (beta * own + others.masked_fill(ignored, 0.0).sum(1)) / logits.shape[1]


def calibration_power(t: float, num_negatives: int, num_items: int) -> float:
    """Return gBCE's beta, a (t (1 - 1/a) + 1/a) = 1 - t (1 - a), where a is the share of items that are negatives."""
    rate = min(1.0, num_negatives / max(1, num_items - 1))
    return 1 - t * (1 - rate)


@register("loss", "bce")
class BinaryCrossEntropy(Loss):
    """The mean binary cross-entropy of the target and its negatives; logits are cosines divided by a temperature.

    Logits are not corrected for the probabilities of the sampler.
    """

    def beta(self) -> float:
        """Power of the target's probability."""
        return 1.0

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
        """Return the loss of every position, [T]; see `Loss`. A negative equal to the target is left out."""
        assert negatives is not None
        index = torch.cat([positives[:, None], negatives], dim=1)
        logits = sampled_logits(outputs, rows, index, temperature=self.config.temperature)
        return binary_cross_entropy(logits, negatives == positives[:, None], self.beta())


@dataclass(frozen=True)
class CalibrationConfig:
    """`t` is how much of the overconfidence is corrected: 0 is BCE, 1 is full calibration, as with all negatives."""

    t: float = 0.75

    def check(self) -> None:
        if not 0 <= self.t <= 1:
            raise UserError(f"gbce.t must be between 0 (BCE) and 1 (fully calibrated), got {self.t}")


@register("loss", "gbce", config=CalibrationConfig)
class CalibratedBinaryCrossEntropy(BinaryCrossEntropy):
    """gBCE: BCE with the target's probability raised to a power, against overconfidence. See `CalibrationConfig`."""

    def beta(self) -> float:
        return calibration_power(self.options.t, self.config.num_negatives, self.context.num_items)
