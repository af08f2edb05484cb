"""Every option of reading either changes what a source gives or is refused by it; none is silently ignored."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import bytes_of
from turbogr.cli import main
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.prepare.source import OF_TEXT_FILES
from turbogr.data.prepare.source_lookup import built_in_sources
from turbogr.data.store import Store
from turbogr.errors import UserError

SOURCES = {source.name: source for source in built_in_sources()}

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

START = 1_650_000_000
RECORDS = [(k % 7, f'"i{k % 6}"' if k % 2 else f"i{k % 6}", k % 5, START + k) for k in range(140)]
NAMES = ("user_id", "item_id", "rating", "timestamp")
PLAIN = [(user, item.strip('"'), rating, time) for user, item, rating, time in RECORDS]

OPTIONS: dict[str, Any] = {
    "user_column": "nothing",
    "item_column": "nothing",
    "time_column": "none",
    "keep_columns": ["rating"],
    "actions": ["rating"],
    "event_features": ["rating:category"],
    "time_unit": "ms",
    "time_format": "%Y",
    "delimiter": "~",
    "column_names": ["a", "b", "c", "d"],
    "quote": "none",
    "encoding": "utf-16",
    "decimal": "dot",  # no decimal mark: it is refused where it is read
    "text_ids": True,
    "drop_bad_rows": True,
    "where": ["rating >= 2"],
    "preset": "kuairand-27k",
    "with_features": True,
    "num_users": 9,
    "num_items": 50,
    "mean_length": 12.0,
    "median_length": 7.0,
    "max_length": 12,
    "min_length": 2,
    "fill": 0.008,
    "fill_length": 64,
    "num_topics": 2,
    "interests": 2,
    "session_length": 2.0,
    "drift": 2,
    "noise": 0.5,
    "side": 0.1,
    "abandon": 0.5,
    "zipf": 0.1,
    "seed": 3,
    "logs": "both",
    "feedback": "all",
}
SMALL = {"num_users": 8, "num_items": 40, "mean_length": 10.0, "median_length": 8.0, "max_length": 30}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def delimited(between: str, header: str = "") -> Callable[[Path, str], None]:
    def write(path: Path, bad: str) -> None:
        lines = [between.join(map(str, row)) for row in RECORDS]
        path.write_text(header.replace(",", between) + "\n".join(lines) + f"\n{bad}")

    return write


def write_sasrec(path: Path, bad: str) -> None:
    path.write_text("".join(f"{u} {k % 6}\n" for k, (u, *_) in enumerate(RECORDS)) + bad)


def write_p5(path: Path, bad: str) -> None:
    items: dict[int, list[int]] = {}
    for k, (user, *_) in enumerate(RECORDS):
        items.setdefault(user, []).append(k % 6)
    path.write_text("".join(f"{user} {' '.join(map(str, own))}\n" for user, own in items.items()) + bad)


def write_json(path: Path, bad: str) -> None:
    path.write_text("".join(json.dumps(dict(zip(NAMES, row, strict=True))) + "\n" for row in PLAIN) + bad)


def write_parquet(path: Path, bad: str) -> None:
    table = [*PLAIN, (None, "i1", 1, START)] if bad else PLAIN
    pq.write_table(pa.table(dict(zip(NAMES, map(list, zip(*table, strict=True)), strict=True))), path)


def write_kuairand(path: Path, bad: str) -> None:
    path.mkdir(exist_ok=True)
    header = "user_id,video_id,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,rating\n"
    body = "".join(f"{u},{k % 6},{1000 * t},{k % 3 % 2},0,0,0,0,0,0,{r}\n" for k, (u, _, r, t) in enumerate(RECORDS))
    (path / "log_standard_a.csv").write_text(header + body + bad)
    (path / "log_random_a.csv").write_text(header + body)


HEADER = ",".join(NAMES) + "\n"
INPUTS: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    "csv": ("log.csv", delimited(",", HEADER)),
    "tsv": ("log.tsv", delimited("\t", HEADER)),
    "parquet": ("log.parquet", write_parquet),
    "jsonl": ("log.jsonl", write_json),
    "movielens": ("ratings.dat", delimited("::")),
    "amazon": ("ratings.csv", delimited(",")),
    "sasrec": ("log.txt", write_sasrec),
    "p5": ("log.txt", write_p5),
    "recbole": ("log.inter", delimited("\t", "user_id:token,item_id:token,rating:float,timestamp:float\n")),
    "kuairand": ("KuaiRand", write_kuairand),
}


def outcome(source: str, folder: Path, bad: str = "", **options: Any) -> object:
    """What a call gives: the store's files, or the message."""
    paths = []
    if source == "synthetic":
        options = {**SMALL, **options}
    else:
        name, write = INPUTS[source]
        write(folder / name, bad)
        paths = [folder / name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = prepare(source, paths, folder / "store", overwrite=True, **options)
    except UserError as error:
        return str(error)
    files = bytes_of(store)
    del files["manifest.json"]
    return files


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_an_option_is_heeded_or_refused(tmp_path: Path, source: str, option: str) -> None:
    kind = SOURCES[source]
    value = OPTIONS[option]
    own = {"keep_columns": ["is_like"], "actions": ["is_like"], "event_features": ["is_like"], "where": ["is_like > 0"]}
    if source == "synthetic":
        value = own.get(option, value)
    if source in ("sasrec", "p5"):
        item = dict.fromkeys(("keep_columns", "actions", "event_features"), "item")
        value = [item[option]] if option in item else {"where": ["item > 2"]}.get(option, value)
    if source == "kuairand" and option == "time_unit":
        value = "s"
    bad = "oops\n" if option == "drop_bad_rows" else ""
    with_it = outcome(source, tmp_path, bad, **{option: value})
    flag = "--" + option.replace("_", "-")
    refused = isinstance(with_it, str) and with_it.startswith(f"{flag} is not an option of the source {source!r}")
    assert refused == (option not in (*kind.takes, *kind.own_names)), with_it
    if refused:
        for taken in (*kind.takes, *kind.own_names):
            assert f"--{taken.replace('_', '-')}" in str(with_it)
        assert "Did you mean" not in str(with_it)
    else:
        assert with_it != outcome(source, tmp_path, bad)


def test_the_matrix_is_complete() -> None:
    assert set(OPTIONS) == {*OF_TEXT_FILES, *(name for source in SOURCES.values() for name in source.own_names)}
    assert set(INPUTS) | {"synthetic"} == set(SOURCES)


@pytest.mark.parametrize("option", ["delimiter", "column_names", "quote", "logs", "seed"])
def test_a_table_refuses_what_is_for_files(tmp_path: Path, option: str) -> None:
    table = pd.DataFrame(PLAIN, columns=list(NAMES))
    with pytest.raises(UserError, match="is not an option of the source 'table', which takes --keep-columns"):
        prepare_table(table, tmp_path / "store", **{option: OPTIONS[option]})


def test_a_misspelt_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'min_user_events'"):
        prepare("csv", ["log.csv"], tmp_path / "store", min_user_event=5)


def test_log_is_of_the_synthetic_source_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "csv", "x.csv", "--out", str(tmp_path / "store"), "--log", str(tmp_path / "log")]) == 2
    assert "--log is not an option of the source 'csv'" in capsys.readouterr().err
    (tmp_path / "log").write_text("mine")
    assert main(["prepare", "synthetic", "--out", str(tmp_path / "store"), "--log", str(tmp_path / "log")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


def test_logs_are_chosen_only_in_a_folder(tmp_path: Path) -> None:
    write_kuairand(tmp_path / "KuaiRand", "")
    files = sorted((tmp_path / "KuaiRand").iterdir())
    with pytest.raises(UserError, match=r"--logs chooses among the logs of a folder, but .*log_random_a.csv is none"):
        prepare("kuairand", files[0], tmp_path / "store", logs="random")
    assert prepare("kuairand", files[0], tmp_path / "store").num_events > 0


@pytest.mark.parametrize("option", ["time_unit", "time_format"])
def test_times_that_need_no_unit_or_format(tmp_path: Path, option: str) -> None:
    given = {option: OPTIONS[option]}
    moments = pa.array([START * 1000 + k for k in range(4)], pa.timestamp("ms"))
    table = pa.table({"user_id": [1, 2, 1, 2], "item_id": [1, 2, 3, 4], "timestamp": moments})
    flag = "--" + option.replace("_", "-")
    with pytest.raises(UserError, match=f"needs no {flag}; leave it out"):
        prepare_table(table, tmp_path / "store", **given)
    with pytest.raises(UserError, match=f"{flag} says how times are written, but the log has none"):
        prepare_table(table, tmp_path / "store", time_column="none", **given)


def test_a_unit_is_for_numbers(tmp_path: Path) -> None:
    table = pa.table({"user_id": [1, 2], "item_id": [1, 2], "timestamp": ["2022-05-01", "2022-05-02"]})
    with pytest.raises(UserError, match="--time-unit s is for numbers, but column 'timestamp' holds text like '2022"):
        prepare_table(table, tmp_path / "store", time_unit="s")
    with pytest.raises(UserError, match="leave one of them out"):
        prepare_table(table, tmp_path / "store", time_unit="s", time_format="%Y-%m-%d")


def test_text_ids_do_not_go_with_a_store_of_integers(tmp_path: Path) -> None:
    table = pa.table({"user_id": [1, 2], "item_id": ["a", "b"], "timestamp": [1, 2]})
    prepare_table(table, tmp_path / "old")
    with pytest.raises(UserError, match=r"--text-ids does not go with --extend .*old, whose user ids are integers"):
        prepare_table(table, tmp_path / "new", extend=tmp_path / "old", text_ids=True)


def test_quotes_that_are_part_of_the_text(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text('user,artist,time\n1,"Weird Al" Yankovic,1\n2,"Heroes,2\n1,plain,3\n')
    with pytest.raises(UserError, match=r"line 2: .*say --quote none if quotes are part of the text"):
        prepare("csv", log, tmp_path / "store", item_column="artist")
    store = prepare("csv", log, tmp_path / "store", item_column="artist", quote="none")
    assert store.item_ids.decode([0, 1, 2]).tolist() == ['"Heroes', '"Weird Al" Yankovic', "plain"]
    with pytest.raises(UserError, match=re.escape("--quote must be double or none, got '|'")):
        prepare("csv", log, tmp_path / "other", item_column="artist", quote="|")


def test_one_name_may_stand_for_a_list_of_one(tmp_path: Path) -> None:
    table = pd.DataFrame(PLAIN, columns=list(NAMES))
    store = prepare_table(table, tmp_path / "store", keep_columns="rating", where="rating >= 3")
    assert isinstance(store, Store)
    assert set(store.actions["rating"].tolist()) == {3, 4}
