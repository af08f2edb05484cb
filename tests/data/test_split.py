from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from turbogr.cli import main
from turbogr.data.prepare.preparation import prepare_table
from turbogr.data.split import Split, future_leak, parse_rule
from turbogr.data.store import Store
from turbogr.errors import Note, UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Users with 1, 2, 3 and 4 events at the times 10, 20, 30, 40."""
    users = [u for u in range(1, 5) for _ in range(u)]
    times = [10 * (k + 1) for u in range(1, 5) for k in range(u)]
    return prepare_table(
        pl.DataFrame({"user_id": users, "item_id": list(range(10)), "timestamp": times}), tmp_path / "store"
    )


@pytest.mark.parametrize(
    ("held_out", "words"),
    [
        (0, None),
        (1, "only 1 user has a test item, so metrics mean nothing: one user is 100% of HR@10"),
        (3, "only 3 users have a test item, so metrics mean nothing: one user is 33% of HR@10"),
        (29, "mean nothing"),
        (100, "only 100 users have a test item: HR@10 is uncertain by up to ±0.10 (95 %)"),
        (299, "±0.06"),
        (300, None),
    ],
)
def test_few_users_are_pointed_out(held_out: int, words: str | None) -> None:
    test = np.where(np.arange(500) < held_out, 5, -1)
    said = Split("leave-one-out", test, np.full(500, -1), test, (test, test, test, test)).few_users()
    assert said is None if words is None else words in str(said)


def test_preparing_and_inspecting_few_users_say_so(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = pl.DataFrame({"user_id": [1, 1, 2, 2], "item_id": [1, 2, 1, 3], "timestamp": [1, 2, 3, 4]})
    with pytest.warns(Note, match="only 2 users have a test item, so metrics mean nothing") as warned:
        prepare_table(table, tmp_path / "small")
    assert {warning.filename for warning in warned} == {__file__}, "not a line of ours"
    assert main(["inspect", str(tmp_path / "small")]) == 0
    assert "only 2 users have a test item, so metrics mean nothing" in capsys.readouterr().out


def test_leave_one_out(store: Store) -> None:
    split = Split.of(store, "leave-one-out")
    assert split.train_end.tolist() == [1, 2, 5, 9]
    assert split.targets("test").tolist() == [-1, 2, 5, 9]
    assert split.targets("valid").tolist() == [-1, -1, -1, -1]


def test_leave_two_out_keeps_a_history_for_every_target(store: Store) -> None:
    split = Split.of(store)
    assert split.rule == "leave-two-out"
    assert split.train_end.tolist() == [1, 2, 4, 8]
    assert split.targets("test").tolist() == [-1, 2, 5, 9]
    assert split.targets("valid").tolist() == [-1, -1, 4, 8]


def test_a_cut_in_time(store: Store) -> None:
    split = Split.of(store, "time:20")
    assert split.train_end.tolist() == [1, 2, 4, 7]
    assert split.targets("test").tolist() == [-1, 2, 4, 7]


def test_two_cuts_in_time(store: Store) -> None:
    split = Split.of(store, "time:20,40")
    assert split.train_end.tolist() == [1, 2, 4, 7]
    assert split.targets("valid").tolist() == [-1, 2, 4, 7]
    assert split.targets("test").tolist() == [-1, -1, -1, 9]


def test_a_user_who_comes_after_the_cut_has_no_target(store: Store) -> None:
    split = Split.of(store, "time:5")
    assert (split.targets("test") == -1).all()
    assert split.train_end.tolist() == store.offsets[:-1].tolist()


@pytest.mark.parametrize("rule", ["leave-one-out", "leave-two-out", "time:25", "time:15,35"])
def test_training_never_reaches_a_target(store: Store, rule: str) -> None:
    split = Split.of(store, rule)
    for part in ("valid", "test"):
        targets = split.targets(part)
        held = targets >= 0
        assert (targets[held] >= split.train_end[held]).all()
        assert (targets[held] > np.asarray(store.offsets)[:-1][held]).all()
    assert split.describe()


def test_rules_are_read(store: Store) -> None:
    assert (
        parse_rule("time:2022-05-01")
        == f"time:{int(datetime.datetime(2022, 5, 1, tzinfo=datetime.timezone.utc).timestamp())}"
    )
    assert parse_rule("time:1970-01-01T01:00:00+01:00,60") == "time:0,60"
    with pytest.raises(UserError, match="Did you mean 'leave-one-out'"):
        parse_rule("leave-one-ot")
    for wrong in ("time:", "time:yesterday", "time:20,10", "time:10,10", "time:1,2,3"):
        with pytest.raises(UserError, match="split"):
            parse_rule(wrong)
    with pytest.raises(ValueError, match="part"):
        Split.of(store).targets("tests")


def test_positions_cannot_be_cut_in_time(tmp_path: Path) -> None:
    table = pl.DataFrame({"user_id": [1, 1, 2, 2], "item_id": [1, 2, 1, 2]})
    store = prepare_table(table, tmp_path / "store", time_column="none")
    assert store.manifest.times == "positions"
    assert store.times.tolist() == [0, 1, 0, 1]
    assert future_leak(store, Split.of(store)) is None
    with pytest.raises(UserError, match="only positions"):
        Split.of(store, "time:1")


def test_the_leak_is_the_share_of_later_training_events(tmp_path: Path) -> None:
    # User 1 is done before user 2 starts: all of user 2's training events are later than user 1's test event.
    table = pl.DataFrame(
        {"user_id": [1] * 5 + [2] * 5, "item_id": list(range(10)), "timestamp": list(range(0, 1000, 100))}
    )
    store = prepare_table(table, tmp_path / "store")
    leak = future_leak(store, Split.of(store, "leave-one-out"))
    assert leak is not None
    assert leak.later_share == pytest.approx((4 / 8 + 0) / 2)
    strict = future_leak(store, Split.of(store, "time:350"))
    assert strict is not None
    assert strict.later_share == 0


def test_all_events_after_a_cut_in_time_are_its_parts(store: Store) -> None:
    """Also those of users without earlier events, whose items nothing could be predicted from."""
    split = Split.of(store, "time:15,35")
    times, starts = np.asarray(store.times), np.asarray(store.offsets[:-1])
    kept = {"train": times < 15, "valid": (times >= 15) & (times < 35), "test": times >= 35}
    for part, expected in kept.items():
        first, end = split.events(part)
        found = np.concatenate([np.arange(a, b) for a, b in zip(first, end, strict=True)])
        assert sorted(found.tolist()) == np.flatnonzero(expected).tolist() and len(found), part
        assert (first >= starts).all()
    one = Split.of(store, "leave-two-out")
    assert [int((b - a).sum()) for a, b in map(one.events, kept)] == [
        store.num_events - int((one.valid >= 0).sum()) - int((one.test >= 0).sum()),
        int((one.valid >= 0).sum()), int((one.test >= 0).sum()),
    ]  # fmt: skip
