"""An HNSW index of the item vectors (faiss), with its recall measured against exact search.

Why faiss and not hnswlib: it is released several times a year with wheels, while hnswlib's last release (0.8.0) is of
December 2023 and comes as source alone; both are the same algorithm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbogr.exports.standalone import top_rows

NEIGHBOURS = 32  # links of an item in every layer
BUILD_BREADTH = 80
BREADTHS = (32, 64, 128, 256, 512)
GOOD_RECALL = 0.99
USE_FROM = 200_000  # items from which serving searches the index unless it is said otherwise
_K = 10
_QUERIES_AT_ONCE = 16


def build_index(
    vectors: NDArray[np.float32], *, neighbours: int = NEIGHBOURS, breadth: int = BUILD_BREADTH, quantised: bool = False
) -> Any:
    """Return a faiss index of unit vectors for dot products; with `quantised` it keeps 8 bits a number."""
    import faiss

    width = vectors.shape[1]
    if quantised:
        kind = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexHNSWSQ(width, kind, neighbours, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = breadth
        index.train(vectors[:: max(1, len(vectors) // 100_000)])
    else:
        index = faiss.IndexHNSWFlat(width, neighbours, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = breadth
    index.add(vectors)
    return index


def recall(index: Any, vectors: NDArray[np.float32], queries: NDArray[np.float32], breadth: int) -> float:
    """Return which share of the 10 best items of exact search the index finds, over all queries."""
    import faiss

    k = min(_K, len(vectors))
    parameters = faiss.SearchParametersHNSW(efSearch=breadth)
    hits = 0
    for first in range(0, len(queries), _QUERIES_AT_ONCE):
        some = queries[first : first + _QUERIES_AT_ONCE]
        _, found = index.search(some, k, params=parameters)
        for rows, scores in zip(found, some @ vectors.T, strict=True):
            hits += len(np.intersect1d(rows, top_rows(scores, k)))
    return hits / max(1, k * len(queries))


def write_index(path: Path, vectors: NDArray[np.float32], queries: NDArray[np.float32]) -> dict[str, Any]:
    """Build and write an index and return what is known of it: its recall on `queries`, and with which breadth."""
    import faiss

    index = build_index(vectors)
    measured = 0.0
    breadth = BREADTHS[0]
    for breadth in BREADTHS:
        measured = recall(index, vectors, queries, breadth)
        if measured >= GOOD_RECALL:
            break
    index.hnsw.efSearch = breadth
    faiss.write_index(index, str(path))
    return {
        "file": path.name,
        "kind": "HNSW (faiss)",
        "metric": "dot product of vectors of length 1",
        "neighbours": NEIGHBOURS,
        "ef_construction": BUILD_BREADTH,
        "ef_search": breadth,
        "recall@10": round(measured, 4),
        "measured_on": f"{len(queries)} users, against exact search of all items, seen items included",
        "use": len(vectors) >= USE_FROM,
    }
