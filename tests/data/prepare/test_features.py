"""Actions and features on their way from a log and from tables into a store."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turbogr.cli import main
from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.store import Store
from turbogr.data.store_checksums import store_damages
from turbogr.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning"),
    pytest.mark.filterwarnings("ignore::turbogr.errors.Note"),
]

LOG = pl.DataFrame(
    {
        "user_id": [1, 1, 1, 2, 2, 3, 3, 3],
        "item_id": [10, 11, 12, 12, 10, 11, 13, 10],
        "timestamp": [10, 20, 30, 15, 35, 12, 22, 40],
        "tab": ["home", "feed", "home", None, "feed", "feed", "home", " "],
        "ms": [1.5, 2.5, None, 4.0, 5.0, 6.0, 7.0, 8.0],
        "click": [1, 0, 1, 0, 1, 0, 0, 1],
        "rating": [5, 3, 4, None, 1, 2, 5, 4],
    }
)


def make(path: Path, log: pl.DataFrame = LOG, **options: Any) -> Store:
    return prepare_table(log, path / "store", **{"split": "time:25", **options}, overwrite=True)


def values(store: Store, key: str) -> list[Any]:
    """The values of a feature as the log has them, None where none is given."""
    column = store.features[key]
    if column.info.kind == "category":
        return [None if v < 0 else column.vocabulary.decode([v])[0] for v in column.values.tolist()]
    if column.info.kind == "categories":
        found = column.vocabulary.decode(column.values).tolist()
        return [found[a:b] for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)]
    rows = column.values.reshape(-1, column.info.size) if column.info.kind == "vector" else column.values
    return [None if np.isnan(v).any() else v for v in np.asarray(rows).tolist()]


def messages(caught: list[warnings.WarningMessage]) -> str:
    return "\n".join(str(warning.message) for warning in caught)


def test_actions_and_event_features_follow_their_events(tmp_path: Path) -> None:
    store = make(tmp_path, actions=["click", "like=rating>=4", "rating"], event_features=["tab", "ms"])
    assert values(store, "event.tab") == ["home", "feed", "home", None, "feed", "feed", "home", None]
    assert values(store, "event.ms") == [1.5, 2.5, None, 4, 5, 6, 7, 8]
    assert values(store, "action.like") == [1, 0, 1, None, 0, 0, 1, 1], "a missing rating is no dislike"
    infos = store.manifest.features
    assert (infos["action.click"].kind, infos["action.click"].mean) == ("binary", 0.5)
    assert infos["action.rating"].kind == "number" and infos["action.rating"].missing == 1
    assert (infos["event.tab"].size, infos["event.tab"].missing, infos["event.ms"].missing) == (2, 2, 1)
    assert infos["event.ms"].mean == pytest.approx(np.mean([1.5, 2.5, 4, 5, 6, 7, 8]))
    z = store.features["event.ms"].floats(np.array([0, 2, -1]))
    assert z[0, 0] == pytest.approx((1.5 - infos["event.ms"].mean) / infos["event.ms"].std, abs=1e-6)
    assert z[1:].tolist() == [[0, 1], [0, 1]]
    assert store_damages(store.path) == ([], None)


def test_tables_of_features_are_joined_by_raw_id_and_accounted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "items.csv").write_text(
        "item_id,genres,year,brand,name\n13,a|b,1990,x,n13\n10,c,2000,y,n10\n99,a,1,z,n99\n10,d,5,y,again\n,e,1,x,none\n"
        "12,,,x,n12\n"
    )
    users = pl.DataFrame({"user_id": [3, 1], "age": [30, 50], "vip": [True, False]})
    vectors = pa.table({"item_id": [11, 13, 10], "embedding": [[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]]})
    pq.write_table(vectors, tmp_path / "vectors.parquet")
    with pytest.warns(DataWarning, match="1 vector holds values that are missing or infinite"):
        store = make(
            tmp_path, item_features=tmp_path / "items.csv", user_features=users,
            item_vectors=tmp_path / "vectors.parquet", user_feature_columns=["age:number", "vip"],
        )  # fmt: skip
    assert store.item_ids.ids.tolist() == [10, 11, 12, 13]
    assert values(store, "item.genres") == [["c"], [], [], ["a", "b"]]
    assert values(store, "item.year") == ["2000", None, None, "1990"], "few whole numbers are categories"
    assert values(store, "item.brand") == ["y", None, "x", "x"]
    assert values(store, "user.age") == [50, None, 30] and values(store, "user.vip") == ["0", None, "1"]
    assert values(store, "item.embedding") == [[5, 6], [1, 2], None, None]
    account = store.manifest.settings["item_features"]
    assert [account[k] for k in ("records", "matched", "unknown", "duplicates", "without_id", "missing")] == [
        6, 3, 1, 1, 1, 1,
    ]  # fmt: skip
    assert main(["inspect", str(store.path)]) == 0
    said = capsys.readouterr().out
    assert "item features: brand (2 categories, 25.0% without), embedding (vectors of 2, 50.0% without), genres" in said
    assert (
        "3 of 4 items have a record" in said and "1 of 6 records repeat an id; the first record of an id counts" in said
    )
    assert store_damages(store.path) == ([], None)


def test_the_store_does_not_depend_on_blocks_or_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"actions": ["click"], "event_features": ["tab", "ms"]}
    generator = np.random.default_rng(0)
    items = pl.DataFrame({"item_id": generator.permutation(20), "tag": [f"t{k % 7}|t{k % 3}" for k in range(20)]})
    one = make(tmp_path / "one", item_features=items, threads=1, **options)
    monkeypatch.setattr("turbogr.data.prepare.sources.memory_table._BATCH_ROWS", 3)
    several = make(tmp_path / "several", item_features=items, threads=3, **options)
    assert several.manifest.content_hash == one.manifest.content_hash


def test_an_extended_store_keeps_categories_scales_and_features(tmp_path: Path) -> None:
    items = pl.DataFrame(
        {"item_id": [10, 11, 12], "brand": ["b", "a", "b"], "tag": ["x|y", "y", "z"], "year": [1.5, 2.5, 9]}
    )
    vectors = pl.DataFrame({"item_id": [10, 11], "e1": [1.0, 2.0], "e2": [3.0, 4.0]})
    old = make(
        tmp_path / "old", actions=["like=rating>=4"], event_features=["tab", "ms"], item_features=items,
        item_vectors=vectors,
    )  # fmt: skip
    later = pl.DataFrame(
        {
            "user_id": [1, 4, 4], "item_id": [10, 9, 10], "timestamp": [50, 60, 70], "tab": ["away", "home", "zoo"],
            "ms": [100.0, 200.0, 3.0], "rating": [4, 1, 1],
        }
    )  # fmt: skip
    new_items = pl.DataFrame({"item_id": [9, 11], "brand": ["0", "b"], "tag": ["z|a", "q"], "year": [7.5, 8.5]})
    new = make(tmp_path / "new", later, extend=old.path, item_features=new_items)
    assert new.features["event.tab"].vocabulary.decode(range(4)).tolist() == ["feed", "home", "away", "zoo"]
    assert values(new, "event.tab") == ["away", "home", "zoo"] and values(new, "action.like") == [1, 0, 0]
    before, after = old.manifest.features["event.ms"], new.manifest.features["event.ms"]
    assert (after.mean, after.std, after.log) == (before.mean, before.std, before.log) and after.high == 200
    assert values(new, "item.brand") == ["b", "b", "b", None, "0"], "10, 11 (given again), 12, 13 and the new item 9"
    assert values(new, "item.tag") == [["x", "y"], ["q"], ["z"], [], ["z", "a"]]
    assert values(new, "item.year") == [1.5, 8.5, 9, None, 7.5]
    assert values(new, "item.vector") == [[1, 3], [2, 4], None, None, None], "carried over"
    assert new.features["item.brand"].vocabulary.encode(["a", "b", "0"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ({"thing": [10], "x": [1.5]}, {}, "no column looks like the id of the items.*--item-features-id"),
        ({"item_id": [77], "x": [1.5]}, {}, "no record .* is about an item of the log.* ids like 77"),
        ({"item_id": [10], "x": [1.5]}, {"item_feature_columns": ["y"]}, "no column 'y' .--item-feature-columns"),
        ({"item_id": [10], "x": [1.5]}, {"item_feature_columns": ["x:nmber"]}, "'nmber'; use category.*Did you mean"),
        (
            {"item_id": [10, 11], "x": ["1.5", "a"]},
            {"item_feature_columns": ["x:number"]},
            "row 2.*'a' in column 'x' is",
        ),
        ({"item_id": [10], "x": [float("inf")]}, {"item_feature_columns": ["x:number"]}, "column 'x' is infinite"),
        ({"item_id": [10, 11], "a/b": [1.5, 2]}, {}, "cannot be the name of a file"),
        ({"item_id": [10, 11]}, {}, "has no column beside the id"),
    ],
)
def test_wrong_tables_of_features_are_refused(table: dict, options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"(?s){words}"):
        make(tmp_path, item_features=pl.DataFrame(table), **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        ([[1.0, 2.0], [1.0]], "row 2 of the table: a vector of 1 numbers, but the first has 2; all must have the same"),
        ([["a"], ["b"]], "holds lists of .*string, not of numbers"),
        (["a", "b"], "is of type .*string.*, not a list of numbers"),
        ([[], None], "has no vector in the first 2 records"),
    ],
)
def test_wrong_vectors_are_refused(vectors: list, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        make(tmp_path, item_vectors=pa.table({"item_id": [10, 11], "v": vectors}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"event_features": ["tabs"]}, "there is no column 'tabs' .--event-features.*Did you mean 'tab'"),
        ({"event_features": ["tab:number"]}, "'home' in column 'tab' is not a number"),
        ({"event_features": ["tab:categories"]}, "kind 'categories'; use category, number"),
        ({"event_features": ["tab", "tab"]}, "names 'tab' 2 times"),
        ({"actions": ["like=rating~4"]}, "cannot read the condition 'rating~4'|no column 'like=rating~4'"),
        ({"actions": ["all"]}, "takes the columns that a source is known for, and 'table' has none"),
        ({"user_feature_columns": ["age"]}, "names columns of a table; give the table with"),
    ],
)
def test_wrong_names_of_features_are_refused(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"(?s){words}"):
        make(tmp_path, **options)


def test_odd_features_and_actions_are_warned_of(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    n = 400
    click = generator.random(n) < 0.3
    columns = {
        "user_id": np.arange(n) % 20,
        "item_id": generator.integers(0, 30, n),
        "timestamp": 1_600_000_000 + np.arange(n),
        "click": click,
        "never": np.zeros(n),
        "early": np.arange(n) % 2 * (np.arange(n) < 300),
        "watch": 10.0 * np.arange(n),
        "played": np.where(click, 20.0, 1.0) + generator.random(n),
        "played_ms": np.arange(n),
        "same": ["x"] * n,
        "word": np.where(click, "yes", "no"),
        "fair": generator.random(n),
        "id": np.arange(n).astype(str),
    }
    items = pl.DataFrame({"item_id": range(30), "flat": [1.0] * 30})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = make(
            tmp_path, pl.DataFrame(columns), split="time:1600000300", actions=["click", "never", "early", "watch"],
            event_features=["played", "same", "word", "click:category", "fair", "id:category", "played_ms:number"],
            item_features=items, item_feature_columns=["flat"],
        )  # fmt: skip
    said = messages(caught)
    assert "the action 'never' has no positive event, so nothing can be learnt of it" in said
    assert "all 100 test events have early = 0, so its AUC means nothing" in said
    assert "the event feature 'same' is constant" in said and "column 'flat' is constant" in said
    assert "the event feature 'click' is the action itself" in said
    for leaking in (
        "'played' alone tells the action 'click' (AUC",
        "'word' alone tells the action 'click' (AUC 1.000)",
    ):
        assert leaking in said
    assert "'played_ms' alone tells the action 'watch' (correlation 1.0000)" in said
    assert "'fair'" not in said and "'id'" not in said, "a category of its own for every event tells nothing"
    assert "item.flat" in store.features, "what is named is kept"


def test_titles_and_constant_columns_are_left_out_unless_named(tmp_path: Path) -> None:
    log = pl.DataFrame({"user_id": [1, 2] * 60, "item_id": list(range(120)), "timestamp": list(range(120))})
    items = pl.DataFrame(
        {"item_id": range(120), "title": [f"t {k}" for k in range(120)], "kind": ["a", "b"] * 60, "same": ["x"] * 120}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(make(tmp_path, log, item_features=items).features) == ["item.kind"]
    said = messages(caught)
    assert "column 'title' has 120 different values, nearly one for each, so it is left out (name it with" in said
    assert "column 'same' is constant, so a model learns nothing from it; it is left out" in said
    named = make(tmp_path, log, item_features=items, item_feature_columns=["title", "same"])
    assert sorted(named.features) == ["item.same", "item.title"]


def test_the_command_line_and_movielens_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "ratings.dat").write_text("1::10::5::100\n1::11::3::200\n2::10::4::150\n2::11::1::300\n")
    (tmp_path / "movies.dat").write_bytes("10::Amélie (2001)::Comedy|Romance\n11::Heat::Action\n".encode("latin-1"))
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    arguments = [
        "prepare", "movielens", str(tmp_path / "ratings.dat"), "--actions", "like=rating>=4", "--split", "time:120,200",
        "--item-features", str(tmp_path / "movies.dat"), "--user-features", str(tmp_path / "users.dat"),
        "--user-feature-columns", "gender,age:category", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "actions to predict: like (50.00% positive)" in said and "2 of 2 users have a record" in said
    store = Store.open(tmp_path / "out")
    assert values(store, "item.genres") == [["Comedy", "Romance"], ["Action"]]
    assert values(store, "item.title") == ["Amélie (2001)", "Heat"], "Latin-1 is read"
    assert values(store, "user.age") == ["1", "56"]
    with pytest.raises(UserError, match="'movielens' has none; name columns"):
        prepare("movielens", tmp_path / "ratings.dat", tmp_path / "other", event_features="all")
