from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.logs import stored_sequences
from turbogr.data.prepare.preparation import prepare
from turbogr.data.prepare.sources import event_generator
from turbogr.data.prepare.sources.event_generator import PRESETS, Synthetic, count_events, generate, user_lengths
from turbogr.data.prepare.sources.synthetic import SyntheticOptions, write_log
from turbogr.data.store import Store
from turbogr.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")


def columns(settings: Synthetic, first: int, last: int) -> np.ndarray:
    events = generate(settings, first, last)
    return np.stack([events.users, events.items, events.times, events.likes, events.watch_seconds])


def test_a_user_does_not_depend_on_the_block() -> None:
    settings = Synthetic(num_users=60, seed=3)
    whole = columns(settings, 0, 60)
    pieces = np.concatenate([columns(settings, first, first + 7) for first in range(0, 56, 7)], axis=1)
    assert np.array_equal(whole[:, whole[0] < 56], pieces)


def test_seeds_and_settings_change_the_log() -> None:
    first, second = columns(Synthetic(seed=1), 0, 5), columns(Synthetic(seed=2), 0, 5)
    assert first.shape != second.shape or not np.array_equal(first, second)


def test_lengths_have_the_statistics_of_kuairand() -> None:
    settings = Synthetic(**PRESETS["kuairand-27k"])
    lengths = user_lengths(settings, np.arange(settings.num_users))
    assert lengths.mean() == pytest.approx(11_796, rel=0.02)
    assert np.median(lengths) == pytest.approx(8_591, rel=0.02)
    assert 150_000 < lengths.max() <= 228_000


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return prepare("synthetic", [], tmp_path_factory.mktemp("demo") / "store")


def test_the_demo_looks_like_a_log(demo: Store) -> None:
    assert demo.num_users == 6000
    assert 0.95 * 3000 <= demo.num_items <= 3000
    assert demo.lengths.mean() == pytest.approx(60, rel=0.05)
    counts = np.sort(demo.item_counts())[::-1]
    assert counts[: len(counts) // 10].sum() > 0.4 * counts.sum(), "popular items must be popular"
    gaps = np.diff(demo.times)[np.diff(np.repeat(np.arange(demo.num_users), demo.lengths)) == 0]
    assert (gaps > 0).all()
    assert 0.1 < (gaps > 3600).mean() < 0.3, "sessions"


def test_order_and_time_carry_more_than_a_first_order_chain(demo: Store) -> None:
    """HR@10 on the last item: popularity < Markov chain < the successors of the latest items of several interests."""
    ends = np.asarray(demo.offsets[1:])
    items = demo.items.tolist()
    successors: dict[int, Counter[int]] = defaultdict(Counter)
    for start, end in zip(demo.offsets[:-1].tolist(), ends.tolist(), strict=True):
        for place in range(start, end - 2):
            successors[items[place]][items[place + 1]] += 1
    popular = np.argsort(-demo.item_counts(ends - 2), kind="stable").tolist()
    hits = Counter()
    users = range(0, demo.num_users, 5)
    chains = {item: counts.most_common(400) for item, counts in successors.items()}
    for user in users:
        history, target = items[demo.offsets[user] : ends[user] - 1], items[ends[user] - 1]
        seen = set(history)
        unseen = [item for item in popular[:500] if item not in seen][:10]
        chain = [item for item, _ in chains[history[-1]] if item not in seen][:10]
        latest: list[int] = []
        for item in reversed(history):
            following = next((i for i, n in chains.get(item, [])[:3] if n > 1 and i not in seen), None)
            if following is not None and following not in latest and len(latest) < 10:
                latest.append(following)
        hits.update(popular=target in unseen, chain=target in chain, oracle=target in latest)
    rates = {name: hits[name] / len(users) for name in ("popular", "chain", "oracle")}
    assert rates["popular"] < 0.1, rates
    assert rates["chain"] > 2 * rates["popular"], rates
    assert rates["oracle"] > 1.5 * rates["chain"], rates


def test_a_pause_brings_older_interests_back() -> None:
    """Within a session the next episode of one of its two series follows; after a pause often that of another."""
    settings = Synthetic(num_users=300, noise=0.0, abandon=0.0)
    events = generate(settings, 0, 300)
    index = {item: number for number, item in enumerate(event_generator.scatter(np.arange(3000), 3000, 1).tolist())}
    series = np.array([index[item] // 10 for item in events.items.tolist()])
    same_user = np.diff(events.users) == 0
    pause = np.diff(events.times) > 3600
    stays = np.diff(series) == 0
    assert stays[same_user & ~pause].mean() > stays[same_user & pause].mean() + 0.15


def test_kept_columns_and_seed(tmp_path: Path) -> None:
    store = prepare(
        "synthetic", [], tmp_path / "store", num_users=20, seed=5, keep_columns=["is_like", "watch_seconds"]
    )
    assert set(store.actions) == {"is_like", "watch_seconds"}
    assert store.manifest.settings["options"]["seed"] == 5


@pytest.mark.parametrize("name", ["log.parquet", "log.csv", "log"])
def test_the_written_log_prepares_to_the_same_store(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_generator.user_blocks, "__defaults__", (500,))
    settings = Synthetic(num_users=50)
    total = write_log(settings, tmp_path / name)
    source = "csv" if name == "log.csv" else "parquet"
    store = prepare(source, [tmp_path / name], tmp_path / "store")
    direct = prepare("synthetic", [], tmp_path / "direct", num_users=50)
    assert stored_sequences(store) == stored_sequences(direct)
    assert total == store.num_events
    if name == "log":
        assert len(list((tmp_path / name).iterdir())) > 3
        first = pq.read_table(tmp_path / name / "part-00000.parquet")["timestamp"].to_numpy()
        assert (np.diff(first) >= 0).all()
    with pytest.raises(UserError, match="already exists"):
        write_log(settings, tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_users": 1}, "--num-users must be at least 2, but it is 1"),
        ({"median_length": 100.0}, "--median-length must lie between"),
        ({"preset": "kuairand"}, "Did you mean 'kuairand-27k'"),
        ({"num_usrs": 5}, "Did you mean 'num_users'"),
        ({"keep_columns": ["is_lik"]}, "Did you mean 'is_like'"),
    ],
)
def test_wrong_settings(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare("synthetic", [], tmp_path / "store", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="reads no files"):
        prepare("synthetic", [tmp_path], tmp_path / "store")


@pytest.mark.parametrize(
    "given",
    [
        {"fill": 0.496},
        {"fill": 0.496, "preset": "kuairand-27k", "fill_length": 4096},
        {"fill": 0.9, "fill_length": 100, "max_length": 5000},
    ],
)
def test_lengths_fill_what_is_asked_for(given: dict[str, Any]) -> None:
    settings = SyntheticOptions(num_users=5000, **given).settings()
    length = given.get("fill_length", 2048)
    lengths = user_lengths(settings, np.arange(5000))
    assert np.minimum(lengths, length).mean() / length == pytest.approx(given["fill"], rel=0.5 / length)
    assert lengths.min() >= settings.min_length and lengths.max() <= settings.max_length
    assert count_events(settings) == lengths.sum()
    plain = SyntheticOptions(num_users=5000, preset=given.get("preset", "demo")).settings()
    assert plain.scale == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fill_length": 100}, "--fill-length needs --fill"),
        ({"fill": 1.0}, "--fill 1 of --fill-length 2048 is a mean of 2,048.0 events, which must lie between"),
        ({"fill": 0.0}, "change one of them"),
        ({"fill": 0.5, "max_length": 400}, "the smaller of --max-length (400) and --fill-length; change one of them"),
    ],
)
def test_a_fill_that_cannot_be_reached_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        SyntheticOptions(**given).settings()
