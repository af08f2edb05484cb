"""Losses of retrieval, and the negatives that they score against: samplers, sharing between positions, segments."""

from turbogr.negatives.loss import Loss, make_loss
from turbogr.negatives.loss_context import LossContext
from turbogr.negatives.samplers import DrawRequest, Sampler

__all__ = ["DrawRequest", "Loss", "LossContext", "Sampler", "make_loss"]
