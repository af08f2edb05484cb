from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.data.vocabulary import Vocabulary

TEXT = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=8)


def text_vocabulary(ids: list[str], ordered: bool) -> Vocabulary:
    array = pa.array(ids, pa.large_string())
    order = None if ordered else np.array(sorted(range(len(ids)), key=lambda k: ids[k].encode()), np.int64)
    return Vocabulary(array, order)


@settings(max_examples=50)
@given(st.lists(TEXT, min_size=1, max_size=30, unique=True), st.lists(TEXT, max_size=10))
def test_text_ids_are_found_in_any_order(ids: list[str], others: list[str]) -> None:
    for ordered in (True, False):
        mine = sorted(ids, key=str.encode) if ordered else ids
        vocabulary = text_vocabulary(mine, ordered)
        queries = [*others, *mine]
        rows = vocabulary.encode(queries)
        assert rows.tolist() == [mine.index(query) if query in mine else -1 for query in queries]
        assert vocabulary.decode(np.arange(len(mine))).tolist() == mine


@settings(max_examples=50)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30, unique=True),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_integer_ids_are_found_in_any_order(ids: list[int], others: list[int]) -> None:
    for ordered in (True, False):
        mine = np.array(sorted(ids) if ordered else ids, np.int64)
        vocabulary = Vocabulary(mine, None if ordered else np.argsort(mine))
        queries = np.array([*others, *ids], np.int64)
        expected = [mine.tolist().index(query) if query in mine.tolist() else -1 for query in queries.tolist()]
        assert vocabulary.encode(queries).tolist() == expected


def test_many_queries_give_the_same_rows_as_few() -> None:
    ids = sorted(f"id{k}" for k in range(3000))
    vocabulary = text_vocabulary(ids, ordered=True)
    queries = [f"id{k}" for k in range(5000)]
    many = vocabulary.encode(queries)
    few = np.concatenate([vocabulary.encode(queries[k : k + 50]) for k in range(0, 5000, 50)])
    assert np.array_equal(many, few)
    assert (many >= 0).sum() == 3000


def test_ids_may_come_as_text_or_number() -> None:
    numbers = Vocabulary(np.array([3, 7, 11]))
    assert numbers.encode(["7", "07", "x", "11"]).tolist() == [1, -1, -1, 2]
    assert numbers.encode([7.0, 7.5, 2**80, None, True]).tolist() == [1, -1, -1, -1, -1]
    assert text_vocabulary(["11", "3"], ordered=True).encode([3, 4]).tolist() == [1, -1]


def test_no_queries_and_shapes() -> None:
    vocabulary = Vocabulary(np.array([3, 7]))
    assert vocabulary.encode([]).tolist() == []
    assert vocabulary.decode([[0, 1], [1, 1]]).tolist() == [[3, 7], [7, 7]]
    with pytest.raises(IndexError):
        vocabulary.decode([2])
    with pytest.raises(IndexError):
        vocabulary.decode([-1])
