"""Ranking given candidates: tables, the same items for all, lists of another run, and the command."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.tasks.ranking_store import ranking_config, write_ranking_store
from turbogr import machine
from turbogr.cli import main
from turbogr.config import Config, DataConfig, EvaluateConfig, ModelConfig
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.ranker import Ranker, load_ranker
from turbogr.recommend import load
from turbogr.training.run import train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_ranking_store(tmp_path_factory.mktemp("ranker") / "store")


@pytest.fixture(scope="module")
def runs(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
        config = ranking_config(counts=True)
        train(config, store.path, folder / "ranking")
        retrieval = Config(
            model=ModelConfig(name="hstu", dim=16, num_blocks=1, num_heads=2, max_len=16),
            data=DataConfig(batch_size=16),
            evaluate=EvaluateConfig(baselines=(), filter_seen=False),
            train=dataclasses.replace(config.train, epochs=1),
        )
        train(retrieval, store.path, folder / "retrieval")
    return {"ranking": folder / "ranking", "retrieval": folder / "retrieval"}


@pytest.fixture(scope="module")
def ranker(runs: dict[str, Path]) -> Ranker:
    return load_ranker(runs["ranking"])


def items(*rows: int) -> list[str]:
    return [f"item-{row:03d}" for row in rows]


def test_candidates_are_sorted_by_the_first_task_or_by_weights(ranker: Ranker) -> None:
    pairs = pa.table({"user": [103, 101, 103, 103, 101], "item": items(7, 9, 8, 30, 2)})
    found = ranker.rank(pairs)
    assert found.column_names == ["user_id", "item_id", "rank", "score", "click", "stay"]
    assert found["user_id"].to_pylist() == [103, 103, 103, 101, 101] and found["rank"].to_pylist() == [1, 2, 3, 1, 2]
    assert set(found["item_id"].to_pylist()[:3]) == set(items(7, 8, 30))
    scores, clicks = found["score"].to_numpy(), found["click"].to_numpy()
    assert (np.diff(scores[:3]) <= 0).all() and scores[3] >= scores[4] and (scores == clicks).all()
    both = ranker.rank(pairs, by={"click": -1.0, "stay": 0.5}, k=2)
    assert both["rank"].to_pylist() == [1, 2, 1, 2]
    wanted = 0.5 * both["stay"].to_numpy() - both["click"].to_numpy()
    np.testing.assert_allclose(both["score"].to_numpy(), wanted, rtol=1e-5)


def test_a_prediction_does_not_depend_on_the_other_candidates(ranker: Ranker) -> None:
    many = ranker.rank(pa.table({"user": [103] * 40, "item": items(*range(40))}))
    alone = ranker.rank(pa.table({"user": [103], "item": items(17)}))
    place = many["item_id"].to_pylist().index("item-017")
    np.testing.assert_allclose(many["click"][place].as_py(), alone["click"][0].as_py(), rtol=1e-5)


def test_times_cut_the_history_and_make_requests_of_their_own(ranker: Ranker, store: Store) -> None:
    user = int(store.lengths.argmax())
    first, last = int(store.offsets[user]), int(store.offsets[user + 1])
    times = [int(store.times[first]), int(store.times[last - 1]) + 1]
    raw = int(store.user_ids.decode([user])[0])
    found = ranker.rank(pa.table({"user": [raw] * 2, "item": items(5, 5), "timestamp": times}))
    assert found["time"].to_pylist() == times and found["rank"].to_pylist() == [1, 1]
    assert found["click"][0].as_py() != found["click"][1].as_py()
    by_default = ranker.rank(pa.table({"user": [raw], "item": items(5)}))
    assert by_default["click"][0].as_py() == pytest.approx(found["click"][1].as_py(), rel=1e-5)
    assert ranker.rank(pa.table({"user": [raw], "item": items(5)}), at=times[1])["click"][0].as_py() == pytest.approx(
        by_default["click"][0].as_py(), rel=1e-5
    )


def test_features_of_events_are_columns(ranker: Ranker) -> None:
    pairs = {"user": [103, 103, 103], "item": items(4, 5, 6)}
    with pytest.warns(UserWarning, match="do not have device, tab, which the model knows of events"):
        plain = ranker.rank(pa.table(pairs))
    given = ranker.rank(pa.table({**pairs, "tab": ["value-0", "value-2", None], "device": ["value-1", None, None]}))
    by_item = [
        dict(zip(found["item_id"].to_pylist(), found["click"].to_pylist(), strict=True)) for found in (plain, given)
    ]
    assert by_item[0]["item-004"] != by_item[1]["item-004"] and by_item[0]["item-005"] != by_item[1]["item-005"]
    assert by_item[0]["item-006"] == pytest.approx(by_item[1]["item-006"], rel=1e-5)
    with pytest.warns(UserWarning, match=r"1 records have a value of 'tab' that the log does not have, such as 'home'"):
        ranker.rank(pa.table({**pairs, "tab": ["home", None, None], "device": [None, None, "value-0"]}))


def test_unknown_users_are_ranked_and_unknown_items_left_out(ranker: Ranker) -> None:
    with pytest.warns(UserWarning, match="users are not in") as caught:
        found = ranker.rank(pa.table({"user": [103, 999, 999, 103, 103], "item": items(4, 5, 888, 4, 6)}))
    texts = " ".join(str(warning.message) for warning in caught)
    assert "1 of 2 users are not in" in texts and "1 of 5 candidates are items that the model does not know" in texts
    assert "1 candidates are there twice" in texts
    assert found["user_id"].to_pylist() == [103, 103, 999]
    with pytest.raises(UserError, match="none of the 1 candidates is an item of"):
        ranker.rank(pa.table({"user": [103], "item": items(888)}))
    with pytest.raises(UserError, match=r"predicts click, stay, not 'clik'\. Did you mean 'click'"):
        ranker.rank(pa.table({"user": [103], "item": items(4)}), by={"clik": 1.0})
    with pytest.raises(UserError, match="leave one of them out"):
        ranker.rank(pa.table({"user": [103], "item": items(4), "timestamp": [1_650_000_000]}), at=1_650_000_000)


def test_a_run_of_another_task_is_no_ranker(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"of the task 'retrieval', not of 'ranking'; use `turbogr\.load`"):
        load_ranker(runs["retrieval"])


def test_lists_of_another_run_are_reranked(ranker: Ranker, runs: dict[str, Path]) -> None:
    retrieval = load(runs["retrieval"])
    first = {}
    for part in retrieval.recommend_batches(users=[103, 101], k=12, filter_seen=False):
        for user, item in zip(part.user_ids.tolist(), part.item_ids.tolist(), strict=True):
            first.setdefault(user, set()).add(item)
    lists = list(ranker.rerank(retrieval.recommend_batches(users=[103, 101], k=12, filter_seen=False), 4))
    assert sum(part.num_users for part in lists) == 2
    for part in lists:
        for user, item in zip(part.user_ids.tolist(), part.item_ids.tolist(), strict=True):
            assert item in first[user]
    assert sum(len(part.item_ids) for part in lists) == 8
    user = lists[0].user_ids[0]
    pairs = pa.table({"user": [user] * 12, "item": sorted(first[user])})
    assert ranker.rank(pairs, 4)["item_id"].to_pylist() == lists[0].item_ids[:4].tolist()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_command_ranks_files_items_and_what_a_run_finds(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranking, pairs, out = str(runs["ranking"]), tmp_path / "pairs.csv", tmp_path / "out.csv"
    pairs.write_text("user,item,tab\n103,item-007,value-0\n103,item-008,value-1\n101,item-009,\n")
    assert main(["recommend", ranking, "--candidates", str(pairs), "--k", "1", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert [row["user_id"] for row in rows] == ["103", "101"] and rows[1]["item_id"] == "item-009"
    assert list(rows[0]) == ["user_id", "item_id", "rank", "score", "click", "stay"]
    assert "2 ranked candidates written" in capsys.readouterr().err
    lines = tmp_path / "out.jsonl"
    shown = tmp_path / "items.txt"
    shown.write_text("item-007\nitem-008\nitem-009\n")
    users = tmp_path / "users.txt"
    users.write_text("103\n105\n")
    command = ["recommend", ranking, "--candidates", str(shown), "--users", str(users), "--by", "click=1,stay=0.1"]
    assert main([*command, "--out", str(lines)]) == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["user_id"] for row in found] == [103] * 3 + [105] * 3
    assert found[0]["score"] == pytest.approx(found[0]["click"] + 0.1 * found[0]["stay"], rel=1e-5)
    two_stages = ["recommend", ranking, "--candidates", str(runs["retrieval"]), "--num-candidates", "20", "--k", "5"]
    assert main([*two_stages, "--out", str(out)]) == 0
    assert len(rows_of(out)) == 60 * 5
    retrieval = ["recommend", str(runs["retrieval"]), "--candidates", str(pairs), "--out", str(out)]
    assert main(retrieval) == 0
    pairs_of = {(row["user_id"], row["item_id"]) for row in rows_of(out)}
    assert pairs_of == {
        ("103", "item-007"),
        ("103", "item-008"),
        ("101", "item-009"),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"is a ranking run, which sorts given candidates: add --candidates FILE"),
        (["--candidates", "PAIRS", "--users", "USERS"], r"both say who is asked for; omit --users"),
        (["--candidates", "PAIRS", "--by", "click=much"], r"--by has 'click=much'; give tasks and weights"),
        (["--candidates", "PAIRS", "--include-seen"], r"are for candidates that a run finds; leave them out"),
        (["--candidates", "NONE.csv"], r"NONE\.csv does not exist"),
        (["--candidates", "PAIRS", "--num-candidates", "0"], r"--num-candidates is 0; give at least 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    options: list[str],
    message: str,
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pairs.csv").write_text("user,item\n103,item-007\n")
    (tmp_path / "users.txt").write_text("103\n")
    given = {"PAIRS": str(tmp_path / "pairs.csv"), "USERS": str(tmp_path / "users.txt")}
    options = [given.get(option, option) for option in options]
    assert main(["recommend", str(runs["ranking"]), *options, "--out", str(tmp_path / "out.csv")]) == 2
    assert re.search(message, capsys.readouterr().err)
