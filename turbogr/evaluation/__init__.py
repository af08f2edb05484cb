"""Exact evaluation over the whole catalogue: positions of held-out items, metrics, baselines."""
