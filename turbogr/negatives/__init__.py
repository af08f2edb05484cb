"""Negative items for the loss: samplers, sharing between positions, segments."""

from turbogr.negatives.objective import Objective

__all__ = ["Objective"]
