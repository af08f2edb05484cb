"""What the simple methods are called, in tables (`TITLES`) and in sentences (`PHRASES`), and why some are missing.

It imports no numerical library, so that pages about runs need none.
"""

from __future__ import annotations

from collections.abc import Mapping

TITLES = {
    "popularity": "most popular",
    "markov": "Markov chain",
    "recent-items": "own recent items",
    "item-knn": "item neighbours",
    "session-knn": "neighbouring users",
    "skip-markov": "Markov chain over skips",
    "ease": "EASE",
    "ease-recency": "EASE with recency",
}

PHRASES = {
    "popularity": "the most popular items",
    "markov": "a Markov chain",
    "recent-items": "a user's own recent items",
    "item-knn": "the neighbours of a user's items",
    "session-knn": "the items of neighbouring users",
    "skip-markov": "a Markov chain over skips",
    "ease": "EASE",
    "ease-recency": "EASE weighted by recency",
}


def refusal_lines(refused: Mapping[str, str]) -> list[str]:
    """Return a sentence for every reason for which methods were not fitted; `refused` has the reasons by method."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(TITLES.get(name, name))
    return [f"Not compared with {' and '.join(names)}: {reason}." for reason, names in by_reason.items()]
