"""Simple methods by their definitions: loops over lists and dense float64 matrices, slow and easy to check."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.evaluation.user_histories import GivenHistories
from turbogr.simple.validation import dense


def training_histories(store: Store, split: Split) -> list[list[int]]:
    """The items of every user that train, oldest first."""
    starts = store.offsets[:-1]
    return [store.items[start:end].tolist() for start, end in zip(starts, split.train_end, strict=True)]


def popularity(logs: list[list[int]], num_items: int) -> np.ndarray:
    counts = Counter(item for log in logs for item in log)
    return np.array([counts[item] for item in range(num_items)]) / max(1, max(counts.values(), default=1))


def newest_ages(history: list[int]) -> dict[int, int]:
    """The age of every distinct item of a history, that of its newest event."""
    return {item: len(history) - 1 - place for place, item in enumerate(history)}


def ease_matrix(logs: list[list[int]], num_items: int, l2: float) -> np.ndarray:
    had = np.zeros((len(logs), num_items))
    for user, log in enumerate(logs):
        had[user, log] = 1
    inverse = np.linalg.inv(had.T @ had + l2 * np.eye(num_items))
    return np.eye(num_items) - inverse / np.diag(inverse)


def item_knn_matrix(logs: list[list[int]], num_items: int, shrinkage: float, neighbours: int) -> np.ndarray:
    sets = [set(log) for log in logs]
    users = [sum(item in had for had in sets) for item in range(num_items)]
    matrix = np.zeros((num_items, num_items))
    for one in range(num_items):
        for other in range(num_items):
            both = sum(one in had and other in had for had in sets)
            if one != other:
                matrix[one, other] = both / (math.sqrt(users[one] * users[other]) + shrinkage)
        order = sorted(range(num_items), key=lambda other, row=matrix[one]: (-row[other], other))
        matrix[one, order[neighbours:]] = 0
    return matrix


def skip_markov_matrix(
    logs: list[list[int]], num_items: int, *, window: int, fade: float, virtual: float, backward: float
) -> np.ndarray:
    counts = np.zeros((num_items, num_items))
    for log in logs:
        for place, item in enumerate(log):
            for distance in range(1, window + 1):
                if place + distance < len(log):
                    counts[item, log[place + distance]] += fade ** (distance - 1)
                    counts[log[place + distance], item] += backward * fade ** (distance - 1)
    events = Counter(item for log in logs for item in log)
    share = np.array([events[item] for item in range(num_items)]) / sum(events.values())
    return (counts + virtual * share) / (counts.sum(axis=1, keepdims=True) + virtual)


def item_to_item(matrix: np.ndarray, history: list[int], decay: float, newest: int | None = None) -> np.ndarray:
    history = history if newest is None else history[-newest:]
    scores = np.zeros(len(matrix))
    for item, age in newest_ages(history).items():
        scores += decay**age * matrix[item]
    return scores


def session_knn(
    logs: list[list[int]], num_items: int, history: list[int], *, neighbours: int, decay: float, newest: int
) -> np.ndarray:
    """The scores of the closest users' items, the largest of which is 1."""
    sets = [set(log) for log in logs]
    users = [sum(item in had for had in sets) for item in range(num_items)]
    ages = newest_ages(history[-newest:])
    similar = []
    for user, had in enumerate(sets):
        common = sum(decay**age * math.log1p(len(logs) / users[item]) for item, age in ages.items() if item in had)
        if common:
            similar.append((-common / math.sqrt(len(had)), user))
    scores = np.zeros(num_items)
    for similarity, user in sorted(similar)[:neighbours]:
        scores[list(sets[user])] -= similarity
    return scores / max(scores.max(), 1e-30)


def given(histories: list[list[int]]) -> GivenHistories:
    items = [np.array(history, np.int64) for history in histories]
    return GivenHistories(items, [np.arange(len(row)) for row in items], np.array([len(row) for row in items]))


def scores_of(scorer, histories: list[list[int]]) -> np.ndarray:
    """The scores of all items, [n, V]."""
    return dense(scorer.score(given(histories), lambda _: None)).numpy()
