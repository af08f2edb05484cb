"""Models: dense parameters and what they compute from item vectors."""

from turbogr.models.retrieval_model import RetrievalModel

__all__ = ["RetrievalModel"]
