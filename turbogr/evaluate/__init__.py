"""Exact evaluation over the whole catalogue: ranks, metrics, baselines and the protocol beside every number."""
