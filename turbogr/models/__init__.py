"""Models: dense parameters and what they compute from item vectors."""

from turbogr.models.retrieval import RetrievalModel

__all__ = ["RetrievalModel"]
