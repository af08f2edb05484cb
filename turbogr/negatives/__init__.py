"""Negative items for the loss."""

from turbogr.negatives.samplers import Sampler, UniformSampler, make_sampler

__all__ = ["Sampler", "UniformSampler", "make_sampler"]
