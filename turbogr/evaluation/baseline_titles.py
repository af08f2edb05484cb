"""What the simple methods are called, in tables (`TITLES`) and in sentences (`PHRASES`).

It imports nothing, so that pages about runs need no numerical library.
"""

from __future__ import annotations

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
