from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores import draw_histories, write_store
from turbogr import cli
from turbogr.data import store as store_module
from turbogr.data.repeats import Repeats, count_repeats
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
