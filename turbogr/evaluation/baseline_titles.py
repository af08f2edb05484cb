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

ACTION_TITLES = {
    "log_rate": "rate of the log",
    "item_rate": "rate of the item",
    "user_rate": "rate of the user",
    "logistic_regression": "logistic regression",
    "fm": "factorisation machine",
    "lightgbm": "LightGBM",
}
"""Those of the methods that predict actions, which ranking runs are compared with."""

PHRASES = {
    "popularity": "the most popular items",
    "markov": "a Markov chain",
    "recent-items": "a user's own recent items",
    "item-knn": "the neighbours of a user's items",
    "session-knn": "the items of neighbouring users",
    "skip-markov": "a Markov chain over skips",
    "ease": "EASE",
    "ease-recency": "EASE weighted by recency",
    "log_rate": "the rate of the whole log",
    "item_rate": "the rate of each item",
    "user_rate": "the rate of each user",
    "logistic_regression": "logistic regression",
    "fm": "a factorisation machine",
    "lightgbm": "LightGBM",
}


def title_of(name: str) -> str:
    """Return what a simple method is called in tables; a name that is none stays."""
    return TITLES.get(name) or ACTION_TITLES.get(name, name)


def refusal_lines(refused: Mapping[str, str]) -> list[str]:
    """Return a sentence for every reason for which methods were not fitted; `refused` has the reasons by method."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(title_of(name))
    return [f"Not compared with {' and '.join(names)}: {reason}." for reason, names in by_reason.items()]
