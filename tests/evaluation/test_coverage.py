from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.evaluation.test_evaluator import MeanEncoder
from tests.stores import draw_histories
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.evaluation import coverage as coverage_module
from turbogr.evaluation.coverage import coverage
from turbogr.evaluation.job_pool import Interrupted
from turbogr.evaluation.metric_info import Coverage
from turbogr.evaluation.scorer import ModelScorer, no_step
from turbogr.evaluation.user_histories import StoreHistories


def naive(encoder: MeanEncoder, store: Store, k: int, filter_seen: bool) -> int:
    split = Split.of(store)
    users = np.flatnonzero(split.test >= 0)
    histories = StoreHistories(store, users, split.test[users])
    scores = ModelScorer(encoder, 10).encode(histories, no_step) @ encoder.matrix.T
    shown: set[int] = set()
    for place, user in enumerate(users):
        seen = store.items[store.offsets[user] : split.test[user]]
        if filter_seen:
            scores[place, torch.from_numpy(seen.astype(np.int64))] = -torch.inf
        order = torch.argsort(scores[place], descending=True, stable=True)
        shown.update(row for row in order[:k].tolist() if scores[place, row] > -torch.inf)
    return len(shown)


@pytest.mark.parametrize("filter_seen", [True, False])
@pytest.mark.parametrize("k", [1, 3, 50])
def test_coverage_counts_the_items_of_all_lists(make_store: Callable[..., Store], k: int, filter_seen: bool) -> None:
    store = make_store(draw_histories(5, 150, 40, shortest=3), 40)
    encoder = MeanEncoder(40)
    found = coverage(ModelScorer(encoder, 10), store, Split.of(store), k=k, filter_seen=filter_seen)
    assert found == Coverage(k, naive(encoder, store, k, filter_seen), 40, 150)
    assert found.share == found.num_shown / 40


def test_a_large_catalogue_is_measured_on_some_users(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(draw_histories(5, 150, 40, shortest=3), 40)
    monkeypatch.setattr(coverage_module, "MAX_SCORES", 40 * 70)
    found = coverage(ModelScorer(MeanEncoder(40), 10), store, Split.of(store))
    assert found.num_users == 70 and 0 < found.num_shown <= 40


def test_coverage_can_be_interrupted(make_store: Callable[..., Store]) -> None:
    store = make_store(draw_histories(5, 150, 40, shortest=3), 40)
    with pytest.raises(Interrupted):
        coverage(ModelScorer(MeanEncoder(40), 10), store, Split.of(store), should_stop=lambda: True)
