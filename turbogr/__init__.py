"""TurboGR: train generative recommenders on interaction logs, from a laptop to a cluster."""

__version__ = "0.1.0"
