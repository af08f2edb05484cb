from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import draw_histories, write_store
from turbogr import cli
from turbogr.data import batching
from turbogr.data import store as store_module
from turbogr.data.loader import Loader
from turbogr.data.repeats import RepeatedEvents, Repeats, count_repeats
from turbogr.data.split import Split


def definition(histories: list[list[int]], event_of: Callable[[list[int]], int | None]) -> tuple[int, int]:
    chosen = [(history, event_of(history)) for history in histories]
    found = [history[event] in history[:event] for history, event in chosen if event is not None]
    return len(found), sum(found)


@pytest.mark.parametrize("max_events", [1, 7, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_repeats_are_counted_by_their_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, max_events: int
) -> None:
    monkeypatch.setattr(store_module.Store.user_blocks, "__defaults__", (max_events,))
    histories = [[], *draw_histories(seed, 60, 12), [3], [3, 3], []]
    store = write_store(tmp_path / "store", histories, 12)
    found = count_repeats(store, Split.of(store))
    wanted = definition(histories, lambda history: len(history) - 2 if len(history) >= 3 else None)
    assert found == Repeats("validation items", *wanted)
    found = count_repeats(store, Split.of(store, "leave-one-out"))
    wanted = definition(histories, lambda history: len(history) - 2 if len(history) >= 3 else None)
    assert found == Repeats("last training items of the users", *wanted), "the last item is the test item"
    found = count_repeats(store, Split.of(store, "time:300"))
    wanted = definition(histories, lambda history: min(5, len(history)) - 1 if len(history) >= 2 else None)
    assert found == Repeats("last training items of the users", *wanted), "an event every minute"
    assert 0 < found.num_repeated < found.num_items


def test_a_log_without_two_training_events_has_no_repeats_to_count(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [[0], [1, 1], []], 2)
    assert count_repeats(store, Split.of(store)) is None


def test_the_test_items_have_no_part_in_it(tmp_path: Path) -> None:
    one = write_store(tmp_path / "one", [[0, 1, 2], [3, 4, 4]], 5)
    all_repeated = write_store(tmp_path / "all", [[0, 1, 1], [3, 4, 3]], 5)
    assert count_repeats(one, Split.of(one)) == count_repeats(all_repeated, Split.of(all_repeated))


def test_from_a_fifth_on_seen_items_are_candidates() -> None:
    below, at = Repeats("validation items", 1000, 199), Repeats("validation items", 1000, 200)
    assert below.filter_seen and not at.filter_seen
    assert below.conclude() == (
        "199 of 1,000 validation items (19.9%) are items that the user has had before; below 20%, so seen items are "
        "left out, and a repeat counts as missed"
    )
    assert at.conclude() == (
        "200 of 1,000 validation items (20.0%) are items that the user has had before; 20% or more, so seen items are "
        "ranked and recommended like all others"
    )
    assert "as evaluate.filter_seen=true says, seen items are left out" in at.conclude(True)
    assert "as evaluate.filter_seen=false says, seen items are ranked" in below.conclude(False)
    assert Repeats("validation items", 7, 1).describe().startswith("1 of 7 validation items (14.3%) is an item that")
    none = Repeats("validation items", 7, 0).conclude()
    assert none.startswith("none of the 7 validation items is an item that") and "missed" not in none


def test_prepare_and_inspect_say_how_many_and_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    # The validation items of users 1 and 2 are repeats, the test items of all four.
    histories = {1: "abab", 2: "bcbc", 3: "abcc", 4: "cbaa"}
    rows = [f"{user},{item},{time}" for user, items in histories.items() for time, item in enumerate(items)]
    log.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    sentence = "2 of 4 validation items (50.0%) are items that the user has had before; 20% or more, so seen items are"
    assert cli.main(["prepare", "csv", str(log), "--out", str(tmp_path / "store")]) == 0
    assert f"\n{sentence}" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "store"), "--json", str(tmp_path / "facts.json")]) == 0
    assert f"\nrepeats: {sentence}" in capsys.readouterr().out
    assert '"num_repeated": 2' in (tmp_path / "facts.json").read_text()


def repeated_events(histories: list[list[int]]) -> list[bool]:
    return [item in history[:place] for history in histories for place, item in enumerate(history)]


@pytest.mark.parametrize("max_events", [1, 5, 13, 1 << 20])
def test_every_repeated_event_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_events: int) -> None:
    monkeypatch.setattr(store_module.Store.user_blocks, "__defaults__", (max_events,))
    histories = [[], *draw_histories(0, 50, 12), [3], [3, 3, 3], []]
    store = write_store(tmp_path / "store", histories, 12)
    found = RepeatedEvents(store).of(np.arange(store.num_events)).tolist()
    assert found == repeated_events(histories) and 0 < sum(found) < len(found)
    assert RepeatedEvents(store).of(np.array([store.num_events - 1, 0])).tolist() == [True, False]


@pytest.mark.parametrize("window", ["last", "split"])
def test_a_target_is_trained_on_unless_the_user_has_had_it_also_before_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    monkeypatch.setattr(batching, "_EVENTS_AT_ONCE", 11)
    histories = [*draw_histories(2, 50, 12, longest=30), [5] * 9]
    store = write_store(tmp_path / "store", histories, 12)
    split, repeated = Split.of(store), repeated_events(histories)
    options: dict[str, Any] = {"max_len": 4, "batch_size": 7, "window": window}
    everything, loader = Loader(store, split, **options), Loader(store, split, skip_repeats=True, **options)
    kept, left_out = [], []
    for batch in loader:
        trained = set(range(batch.num_tokens)) if batch.trained is None else set(batch.trained.tolist())
        for place, event in enumerate(batch.events.tolist()):
            (kept if place in trained else left_out).append(event)
        part = batch.at_trained()
        assert batch.targets is not None and part.targets is not None
        assert part.events.tolist() == [e for place, e in enumerate(batch.events.tolist()) if place in trained]
        assert part.targets.tolist() == [t for place, t in enumerate(batch.targets.tolist()) if place in trained]
        assert (part.items.lengths > 0).all() and part.num_sequences == batch.num_sequences
        assert part.targets_of_step.tolist() == batch.targets.tolist(), "negatives come from all targets"
        assert part.num_trained_of_step == batch.num_trained_of_step == len(trained)
    inputs = [event for batch in everything for event in batch.events.tolist()]
    assert sorted(kept) == sorted(event for event in inputs if not repeated[event + 1])
    assert all(repeated[event + 1] for event in left_out)
    assert loader.num_targets == len(kept) and loader.num_targets_skipped == len(inputs) - len(kept)
    assert loader.num_sequences < everything.num_sequences, "one that has no target left is left out"


def test_ranks_know_how_many_targets_the_whole_step_has(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", draw_histories(2, 50, 12, longest=30), 12)
    options: dict[str, Any] = {"max_len": 4, "batch_size": 7, "skip_repeats": True}
    whole = list(Loader(store, Split.of(store), **options))
    ranks = [list(Loader(store, Split.of(store), rank=rank, num_ranks=3, **options)) for rank in range(3)]
    for batch, *parts in zip(whole, *ranks, strict=True):
        own = [part.at_trained().num_tokens for part in parts]
        assert sum(own) == batch.at_trained().num_tokens
        assert {part.num_trained_of_step for part in parts} == {batch.num_trained_of_step} == {sum(own)}


def test_a_log_without_repeats_is_read_as_if_nothing_were_skipped(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [list(range(user % 9 + 3)) for user in range(40)], 12)
    loader = Loader(store, Split.of(store), max_len=4, batch_size=7, skip_repeats=True)
    assert loader.num_targets_skipped == 0 and loader.num_targets == loader.num_tokens
    for batch in loader:
        assert batch.trained is None and batch.step_num_trained is None and batch.at_trained() is batch
