from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.stores import draw_histories
from turbogr.config import ModelConfig
from turbogr.data.batching import Batch, history_batch
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation import scorer as scorer_module
from turbogr.evaluation.evaluator import (
    Interrupted,
    baseline_metrics,
    evaluate,
    measure_baselines,
    write_evaluation,
)
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.metrics import MISSED, ranking_metrics
from turbogr.evaluation.progress_lines import ProgressLines
from turbogr.evaluation.sample_users import sample_users, write_samples
from turbogr.evaluation.scorer import Encoder, ModelScorer
from turbogr.evaluation.user_sample import UserSample
from turbogr.models import RetrievalModel
from turbogr.models.table_encoder import TableEncoder
from turbogr.tables.table import LocalTable

MakeStore = Callable[..., Store]


class MeanEncoder:
    """Not a good recommender but a real one: the query is the mean of the projected vectors of the last events.

    `spread` sets how far apart the items are: 1e-7 makes nearly every pair a near tie, whose order any change of
    rounding would turn over.
    """

    def __init__(self, num_items: int, width: int = 24, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        centre = torch.randn(width, generator=generator)
        self.matrix = F.normalize(centre + spread * torch.randn(num_items, width, generator=generator), dim=1)
        self.project = torch.randn(width, width, generator=generator)
        self.lengths: list[int] = []

    columns: ClassVar[dict[str, str]] = {}

    @property
    def num_items(self) -> int:
        return len(self.matrix)

    def item_rows(self, start: int, stop: int) -> Tensor:
        return self.matrix[start:stop]

    def encode_last(self, batch: Batch) -> Tensor:
        self.lengths += batch.items.lengths.tolist()
        vectors = self.matrix[batch.items.values] @ self.project
        sums = torch.zeros(batch.num_sequences, vectors.shape[1]).index_add_(0, batch.items.row_index(), vectors)
        return F.normalize(sums, dim=1)


KNOWN_SAMPLE = [118, 165, 187]


def hstu(num_items: int, max_len: int) -> TableEncoder:
    config = ModelConfig(dim=16, num_blocks=2, num_heads=2, qk_dim=8, v_dim=8, max_len=max_len, num_time_buckets=16)
    generator = torch.Generator().manual_seed(3)
    model = RetrievalModel(config)
    model.reset_parameters(generator)
    table = LocalTable(num_items, 16)
    table.draw(0, num_items, 0)
    return TableEncoder(model, table.weight)


def definition(
    encoder: Encoder, store: Store, split: Split, part: str, max_len: int, filter_seen: bool, last: int = 10**9
) -> list[int]:
    """One user at a time, scores in fp64, candidates sorted in Python."""
    positions = []
    items = encoder.item_rows(0, store.num_items).double().numpy()
    for user, event in enumerate(split.targets(part)):
        if event < 0:
            continue
        start = int(store.offsets[user])
        batch = history_batch(store, np.array([user]), np.array([event]), max_len)
        scores = items @ encoder.encode_last(batch)[0].double().numpy()
        target, seen = int(store.items[event]), set(store.items[max(start, event - last) : event].tolist())
        gone = seen if filter_seen else set()
        best_first = sorted(set(range(store.num_items)) - gone, key=lambda item: (-scores[item], item))
        positions.append(MISSED if target in gone else 1 + best_first.index(target))
    return positions


@pytest.mark.parametrize("part", ["valid", "test"])
@pytest.mark.parametrize("filter_seen", [True, False])
def test_positions_follow_the_definition(make_store: MakeStore, part: str, filter_seen: bool) -> None:
    store = make_store(draw_histories(1, 150, 40), 40)
    split = Split.of(store)
    encoder = MeanEncoder(40)
    result = evaluate(ModelScorer(encoder, 7), store, split, part, filter_seen=filter_seen)
    assert (MISSED in result.positions) == filter_seen, "some held-out items must be repeated"
    assert max(encoder.lengths) == 7
    assert result.positions.tolist() == definition(encoder, store, split, part, 7, filter_seen)
    for way, found in ((True, result.metrics_exclude_seen), (False, result.metrics_include_seen)):
        assert found == ranking_metrics(np.array(definition(encoder, store, split, part, 7, way)))
    assert result.metrics == ranking_metrics(result.positions)
    assert result.users.tolist() == np.flatnonzero(split.targets(part) >= 0).tolist()
    assert result.num_users + sum(result.skipped.values()) == store.num_users
    assert "leave-two-out" in result.protocol
    assert "all 40 items" in result.protocol


@pytest.mark.parametrize("last", [1, 5, 1000])
def test_the_filter_may_end_after_the_last_items(make_store: MakeStore, last: int) -> None:
    store = make_store(draw_histories(1, 150, 40), 40)
    split = Split.of(store)
    encoder = MeanEncoder(40)
    result = evaluate(ModelScorer(encoder, 7), store, split, filter_last=last)
    assert result.positions.tolist() == definition(encoder, store, split, "test", 7, True, last)
    assert f"without the user's last {last} earlier items" in result.protocol
    everything = evaluate(ModelScorer(encoder, 7), store, split)
    assert (result.positions.tolist() == everything.positions.tolist()) == (last == 1000)
    baselines = [baseline_metrics(store, split, filter_last=limit) for limit in (last, None)]
    assert (baselines[0] == baselines[1]) == (last == 1000)


def test_the_filter_does_not_give_a_repeated_item_away(make_store: MakeStore) -> None:
    """An item that returns is out with all the others: as their only survivor it would stand first by itself."""
    store = make_store([[0, 1, 2, 0], [3, 4, 5, 6], [7, 8, 8, 8]], 9)
    split = Split.of(store)
    encoder = MeanEncoder(9)
    result = evaluate(ModelScorer(encoder, 10), store, split)
    assert (result.positions == MISSED).tolist() == [True, False, True]
    assert "without the user's earlier items; 2 test items were among these and counted as missed" in result.protocol
    assert result.metrics["hr@200"] == 1 / 3
    assert {name: values["hr@200"] for name, values in baseline_metrics(store, split).items()} == {
        "popularity": 1 / 3,
        "markov": 1 / 3,
    }
    recent = evaluate(ModelScorer(encoder, 10), store, split, filter_last=2)
    assert (recent.positions == MISSED).tolist() == [False, False, True]
    assert (
        "without the user's last 2 earlier items; 1 test item was among these and counted as missed" in recent.protocol
    )
    everything = evaluate(ModelScorer(encoder, 10), store, split, filter_seen=False)
    assert everything.metrics["hr@200"] == 1
    assert "missed" not in everything.protocol


@pytest.mark.parametrize("kind", ["spread", "near ties", "hstu"])
def test_no_position_changes_with_the_batch_size_or_the_threads(
    make_store: MakeStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "ENCODE_TOKENS", 300)
    store = make_store(draw_histories(2, 400, 300, longest=30), 300)
    split = Split.of(store)
    encoder = hstu(300, 16) if kind == "hstu" else MeanEncoder(300, spread=1.0 if kind == "spread" else 1e-7)
    wanted = evaluate(ModelScorer(encoder, 16), store, split)
    assert len(set(wanted.positions.tolist())) > 50, "the problem must have many different positions"
    threads = torch.get_num_threads()
    try:
        for batch_size, num_threads in ((1, 1), (64, 2), (100, 3), (10_000, 1)):
            torch.set_num_threads(num_threads)
            again = evaluate(ModelScorer(encoder, 16), store, split, batch_size=batch_size)
            assert again.positions.tolist() == wanted.positions.tolist()
            assert again.metrics == wanted.metrics
    finally:
        torch.set_num_threads(threads)


def test_progress_counts_every_user_and_stopping_ends_it(make_store: MakeStore) -> None:
    store = make_store(draw_histories(3, 300, 20, shortest=2), 20)
    split = Split.of(store)
    steps: list[int] = []
    evaluate(ModelScorer(MeanEncoder(20), 8), store, split, batch_size=64, progress=steps.append)
    assert sum(steps) == 300
    encoder = MeanEncoder(20)
    with pytest.raises(Interrupted):
        evaluate(ModelScorer(encoder, 8), store, split, batch_size=64, should_stop=lambda: len(encoder.lengths) > 0)
    with pytest.raises(Interrupted):
        baseline_metrics(store, split, should_stop=lambda: True)


def test_a_part_without_events_and_a_diverged_model_are_errors(make_store: MakeStore) -> None:
    store = make_store(draw_histories(3, 30, 20, shortest=3), 20, split="leave-one-out")
    split = Split.of(store)
    with pytest.raises(UserError, match="no valid event"):
        evaluate(ModelScorer(MeanEncoder(20), 8), store, split, "valid")
    encoder = MeanEncoder(20)
    encoder.matrix[4] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        evaluate(ModelScorer(encoder, 8), store, split)


def test_baselines_are_measured_on_the_same_users(make_store: MakeStore) -> None:
    store = make_store(draw_histories(4, 400, 60, shortest=3), 60)
    split = Split.of(store)
    metrics = baseline_metrics(store, split, ks=(5,))
    assert list(metrics) == ["popularity", "markov"]
    assert set(metrics["markov"]) == {"hr@5", "ndcg@5", "mrr"}
    assert metrics["markov"]["hr@5"] > 1.3 * metrics["popularity"]["hr@5"], "half of the events follow a chain"


def test_samples_show_what_evaluation_ranked(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(draw_histories(5, 90, 50), 50)
    split = Split.of(store)
    encoder = MeanEncoder(50)
    result = evaluate(ModelScorer(encoder, 10), store, split)
    position_of = dict(zip(store.user_ids.decode(result.users).tolist(), result.positions.tolist(), strict=True))
    samples = sample_users(ModelScorer(encoder, 10), store, split, num_users=6, k=5, num_history=4)
    write_samples(tmp_path / "samples.json", samples)
    users = json.loads((tmp_path / "samples.json").read_text())["users"]
    assert len({user["user"] for user in users}) == 6
    for user in users:
        row = user["user"] - 100
        events = slice(int(store.offsets[row]), int(store.offsets[row + 1]))
        raw = [f"item-{item:03d}" for item in store.items[events]]
        assert [event["item"] for event in user["history"]] == raw[:-1][-4:]
        assert [event["time"] for event in user["history"]] == store.times[events].tolist()[:-1][-4:]
        assert user["target"] == raw[-1]
        assert user["target_time"] == store.times[events.stop - 1]
        position = MISSED if user["target_rank"] is None else user["target_rank"]
        assert position == position_of[user["user"]]
        shown = [entry["item"] for entry in user["recommendations"]]
        assert not set(shown) & set(raw[:-1])
        assert (user["target"] in shown) == (position <= 5)
        if position <= 5:
            assert shown[position - 1] == user["target"]


def test_more_samples_than_users_gives_all_users(make_store: MakeStore) -> None:
    store = make_store([[0, 1, 2], [2, 1, 0]], 3)
    samples = sample_users(ModelScorer(MeanEncoder(3), 10), store, Split.of(store))
    assert [user["user"] for user in samples["users"]] == [100, 101]
    assert all(len(user["recommendations"]) == 1 for user in samples["users"])


def test_the_evaluation_file_has_the_agreed_keys(tmp_path: Path) -> None:
    parts = {"test": {"model": {"hr@10": 0.5}, "popularity": {"hr@10": 0.1}, "markov": {"hr@10": 0.2}}}
    path = tmp_path / "evaluation.json"
    write_evaluation(
        path,
        parts,
        num_users=7,
        protocol="all of it",
        step=3,
        epoch=1.5,
        selected_on="valid ndcg@10",
        rule={"filter_seen": True},
        standard_errors={"test": {"model": {"hr@10": 0.01}}},
        both_ways={"parts_exclude_seen": {"test": {"model": {"hr@10": 0.5}}}},
    )
    assert json.loads(path.read_text()) == {
        "step": 3,
        "epoch": 1.5,
        "selected_on": "valid ndcg@10",
        "parts": parts,
        "standard_errors": {"test": {"model": {"hr@10": 0.01}}},
        "coverage": {},
        "parts_exclude_seen": {"test": {"model": {"hr@10": 0.5}}},
        "num_users": 7,
        "skipped": {},
        "rule": {"filter_seen": True},
        "protocol": "all of it",
    }


def test_a_sample_of_users_is_measured_like_all(make_store: MakeStore) -> None:
    store = make_store(draw_histories(1, 150, 40), 40)
    split, scorer, sample = Split.of(store), ModelScorer(MeanEncoder(40), 7), UserSample(40, seed=3)
    everything, result = evaluate(scorer, store, split), evaluate(scorer, store, split, sample=sample)
    held_out = HeldOut.of(store, split, "test")
    chosen = sample.choose(store, held_out.users)
    assert len(set(chosen.tolist())) == 40 and result.users.tolist() == held_out.users[chosen].tolist()
    assert result.positions.tolist() == everything.positions[chosen].tolist()
    assert result.metrics == ranking_metrics(result.positions) and result.metrics != everything.metrics
    assert result.standard_errors["ndcg@10"] > everything.standard_errors["ndcg@10"]
    assert result.num_users + sum(result.skipped.values()) == store.num_users
    assert result.skipped["not in the sample"] == len(held_out) - 40
    named = f"; a sample of 40 of the {len(held_out)} users, drawn by their ids with seed 3, whose 95 % interval is at"
    assert named in result.protocol
    assert result.protocol.startswith(everything.protocol.partition("; ")[0])
    for name, system in measure_baselines(store, split, sample=sample).items():
        wanted = measure_baselines(store, split)[name].positions
        assert system.positions is not None and wanted is not None
        assert system.positions.tolist() == wanted[chosen].tolist(), "the same users as the model's"
    whole = evaluate(scorer, store, split, sample=UserSample(1000))
    assert (whole.protocol, whole.metrics, whole.skipped) == (
        everything.protocol,
        everything.metrics,
        everything.skipped,
    )


def test_who_is_in_a_sample_follows_from_seed_and_id_alone(make_store: MakeStore) -> None:
    store = make_store(draw_histories(1, 150, 40), 40)
    users = np.arange(store.num_users)
    chosen = UserSample(50, 1).choose(store, users)
    assert set(UserSample(20, 1).choose(store, users)) < set(chosen), "a smaller sample is a part of a larger one"
    assert set(UserSample(50, 2).choose(store, users)) != set(chosen)
    fewer = np.setdiff1d(users, chosen[:10])
    kept = set(fewer[UserSample(50, 1).choose(store, fewer)])
    assert set(chosen[10:]) < kept, "other users of the store change nothing about these"
    known = UserSample(3, 0).choose(store, users)
    assert store.user_ids.decode(known).tolist() == KNOWN_SAMPLE, "the sample of a release stays that of the next"


def test_lines_of_progress_come_at_intervals() -> None:
    said: list[str] = []
    now = [0.0]
    lines = ProgressLines("measuring", 200, say=said.append, every=30.0, clock=lambda: now[0])
    stop = lines.watching(lambda: now[0] >= 100)
    for now[0], done in ((10.0, 50), (31.0, 50), (45.0, 10)):
        lines.advance(done)
    assert said == ["measuring: 100 of 200 users, 31 s so far, about 31 s left"]
    now[0] = 62.0
    assert not stop(), "asking whether to stop shows that work goes on"
    assert said[1:] == ["measuring: 110 of 200 users, 62 s so far, about 51 s left"]
    now[0] = 100.0
    assert stop()
    assert said[2:] == ["measuring: 110 of 200 users, 100 s so far, about 82 s left"]
    quiet = ProgressLines("measuring", shown=False, say=said.append, every=0.0)
    quiet.tick()
    assert len(said) == 3
    ProgressLines("baselines", say=said.append, every=0.0, clock=lambda: 5.0).tick()
    assert said[3:] == ["baselines: 0 s so far"]
