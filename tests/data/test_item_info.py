"""Titles and other columns of items: reading tables, matching them to a store, and showing them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import turbogr
from turbogr import cli
from turbogr.data.item_info import ItemInfo
from turbogr.data.prepare.item_table import add_item_info, read_item_table
from turbogr.data.prepare.preparation import prepare
from turbogr.data.store import CHECKSUMS, ITEM_INFO, Store
from turbogr.errors import Note, UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

MOVIES = 'movieId,title,genres\n1,Toy Story (1995),Animation\n3,"Heat, The (1995)",Action\n9,Gone,Drama\n'
LOG = "userId,movieId,timestamp\n" + "".join(
    f"{u},{i},{1700000000 + 10 * u + i}\n" for u in (1, 2, 3) for i in (1, 2, 3)
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


@pytest.fixture
def store(log: Path, tmp_path: Path) -> Store:
    return prepare("csv", log, tmp_path / "store")


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_titles_are_those_of_the_records_with_the_items_ids(store: Store, tmp_path: Path) -> None:
    info = add_item_info(store, write(tmp_path / "movies.csv", MOVIES))
    assert (info.id_column, info.title_column, info.columns) == ("movieId", "title", ("title", "genres"))
    assert info.titles([2, 1, 0]) == ["Heat, The (1995)", None, "Toy Story (1995)"]
    assert info.titles_of(["3", "7", 1]) == ["Heat, The (1995)", None, "Toy Story (1995)"]
    assert info.values("genres", [0, 1]) == ["Animation", None]
    account = info.account
    assert (account.records, account.matched, account.unknown, account.missing) == (3, 2, 1, 1)
    assert info.table().to_pydict() == {
        "movieId": [1, 2, 3],
        "title": ["Toy Story (1995)", None, "Heat, The (1995)"],
        "genres": ["Animation", None, "Action"],
    }


def test_the_content_of_the_store_does_not_change(store: Store, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in store.path.iterdir() if path.name != CHECKSUMS}
    assert ItemInfo.of(store) is None
    add_item_info(store, write(tmp_path / "movies.csv", MOVIES))
    added = (ITEM_INFO, CHECKSUMS)
    assert {path.name: path.read_bytes() for path in store.path.iterdir() if path.name not in added} == before
    assert Store.open(store.path).manifest.content_hash == store.manifest.content_hash


def test_what_is_no_record_of_an_item_is_counted(store: Store, tmp_path: Path) -> None:
    text = "item_id,name\n1,first\n1,second\n,nobody\n2,  \n50,unknown\n"
    info = add_item_info(store, write(tmp_path / "items.csv", text))
    account = info.account
    assert (account.duplicates, account.without_id, account.unknown, account.missing) == (1, 1, 1, 1)
    assert account.records == account.matched + account.unknown + account.duplicates + account.without_id
    assert info.titles([0, 1, 2]) == ["first", None, None], "the first record counts, and a blank title is none"


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("movies.dat", "1::Caf\u00e9 (1995)::Drama\n3::Heat::Action\n".encode("latin-1"), "Caf\u00e9 (1995)"),
        ("items.tsv", "id\tproduct_name\tprice\n1\tLamp, red\t9,50\n", "Lamp, red"),
        ("items.csv", '\ufeffprice;ProductID;Product Name\n5;1;"Lamp; ""red"""\n', 'Lamp; "red"'),
        ("items.csv", 'movieId,caption\r\n1,"two\nlines"\r\n', "two\nlines"),
        ("items.txt", "sku|label\n1|one\n", "one"),
        ("items.csv", "movieId,whatever\n1,the only other column\n", "the only other column"),
    ],
)
@pytest.mark.filterwarnings("ignore::turbogr.errors.Note")
def test_usual_files_are_read_without_an_option(
    store: Store, tmp_path: Path, name: str, content: str | bytes, title: str
) -> None:
    assert add_item_info(store, write(tmp_path / name, content)).titles([0]) == [title]


def test_text_that_is_not_utf8_is_noted(store: Store, tmp_path: Path) -> None:
    with pytest.warns(Note, match="not UTF-8; it is read as Latin-1"):
        add_item_info(store, write(tmp_path / "movies.dat", "1::Caf\u00e9::Drama\n".encode("latin-1")))


def test_parquet_and_tables_in_memory_keep_their_types(store: Store, tmp_path: Path) -> None:
    table = pa.table({"movieId": [3, 1], "title": ["Heat", None], "year": [1995, None], "tags": [["a", "b"], []]})
    pq.write_table(table, tmp_path / "items.parquet")
    for items in (tmp_path / "items.parquet", table, table.to_pandas()[["movieId", "title", "tags"]]):
        info = add_item_info(store, items)
        assert info.titles([0, 2]) == [None, "Heat"]
    assert add_item_info(store, table).values("year", [0, 1, 2]) == [None, None, 1995]
    assert add_item_info(store, table).values("tags", [2]) == [["a", "b"]]


def test_items_are_described_by_their_text_columns(store: Store) -> None:
    columns = {"title": ["Heat", None], "year": [1995, 1990], "genre": ["Action", None], "tags": [["a", "b"], ["c"]]}
    info = add_item_info(store, pa.table({"movieId": [3, 1], **columns, "maker": ["x", "y"]}))
    assert info.descriptions_of([3, 1, 2, 7]) == ["Action, a, b", "c", "", ""], "the first two, no numbers"
    assert info.column_of("tags", np.array([2, -1, 0])).to_pylist() == ["a, b", None, "c"]
    assert info.column_of("year", np.array([2, 1])).to_pylist() == [1995, None]
    with pytest.raises(
        UserError, match=r"no column 'yaer' about the items\. Did you mean 'year'\? Columns: title, year"
    ):
        info.column_of("yaer", np.array([0]))
    assert add_item_info(store, pa.table({"movieId": [3], "title": ["Heat"]})).descriptions_of([3, 1]) == ["", ""]


def test_text_ids_are_matched_as_they_are(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log.csv", "user,item,time\n" + "".join(f"{u},{i},{u}\n" for u in (1, 2) for i in ("007", "b"))
    )
    store = prepare("csv", log, tmp_path / "text")
    info = add_item_info(store, write(tmp_path / "i.csv", "item,title\n7,seven\n007,bond\nb,bee\n"))
    assert info.titles_of(["007", "b"]) == ["bond", "bee"] and info.account.unknown == 1


def test_named_columns_win_over_guesses(store: Store, tmp_path: Path) -> None:
    file = write(tmp_path / "i.csv", "movieId,key,title,german\n7,1,Heat,Hitze\n8,2,Jaws,Der Hai\n")
    info = add_item_info(store, file, id_column="key", title_column="german")
    assert info.titles([0, 1, 2]) == ["Hitze", "Der Hai", None]
    read = read_item_table(write(tmp_path / "x.csv", "item,film\n1,2\n"), log_column="film")
    assert read.id_column == "film", "what the log calls the item comes first"


def test_without_a_title_the_other_columns_are_kept(store: Store, tmp_path: Path) -> None:
    info = add_item_info(store, write(tmp_path / "i.csv", "movieId,weight,size\n1,3,4\n"))
    assert not info.has_titles and info.titles([0, 1]) == [None, None] and info.values("size", [0]) == ["4"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("movieId,title\n", {}, "holds no records"),
        ("", {}, "is empty"),
        ("a,b\n1,x\n", {}, "no column looks like the id of the items among 'a', 'b'; name it with --item-info-id"),
        ("movieId,title\n1,x\n", {"title_column": "titel"}, "no column 'titel'.*Did you mean 'title'"),
        ("movieId,title\n1,x,y\n", {}, "line 2: 3 values for 2 columns"),
        ("movieId,title,title\n1,x,y\n", {}, "2 columns are called 'title'"),
        ("movieId,title\nx1,x\n", {}, "no record of .* ids like 'x1'; the store's items have ids like 1, 2"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    store: Store, tmp_path: Path, content: str, options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        add_item_info(store, write(tmp_path / "items.csv", content), **options)
    assert ItemInfo.of(store) is None


def test_other_files_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ending '\.xlsx'"):
        add_item_info(store, tmp_path / "items.xlsx")
    with pytest.raises(UserError, match="does not exist"):
        add_item_info(store, tmp_path / "items.csv")
    with pytest.raises(UserError, match="cannot read"):
        add_item_info(store, write(tmp_path / "items.parquet", "no"))


def test_a_damaged_or_foreign_file_is_named(store: Store, log: Path, tmp_path: Path) -> None:
    add_item_info(store, write(tmp_path / "movies.csv", MOVIES))
    other = prepare("csv", write(tmp_path / "b.csv", LOG.replace(",3,", ",4,")), tmp_path / "other")
    (other.path / ITEM_INFO).write_bytes((store.path / ITEM_INFO).read_bytes())
    with pytest.raises(UserError, match="about the items of another store; add it again"):
        ItemInfo.of(other)
    (store.path / ITEM_INFO).write_bytes(b"no")
    with pytest.raises(UserError, match="is damaged; add it again"):
        ItemInfo.of(store)


def test_prepare_takes_the_table_along(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    movies = write(tmp_path / "movies.csv", MOVIES)
    arguments = ["prepare", "csv", str(log), "--out", str(tmp_path / "s")]
    assert cli.main([*arguments, "--item-info", str(movies), "--item-info-title", "genres"]) == 0
    assert (
        "titles from 'genres', also 'title'\n  2 of 3 items have a record\n  1 of 3 records" in capsys.readouterr().out
    )
    assert ItemInfo.of(Store.open(tmp_path / "s")).titles([0]) == ["Animation"]
    with pytest.warns(Note, match="had titles or other columns about its items; give them again"):
        prepare("csv", log, tmp_path / "s", overwrite=True)
    assert ItemInfo.of(Store.open(tmp_path / "s")) is None


def test_a_wrong_table_is_found_before_the_log_is_read(log: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column looks like the id"):
        prepare("csv", log, tmp_path / "s", item_info=write(tmp_path / "i.csv", "a,b\n1,2\n"))
    assert not (tmp_path / "s").exists()
    with pytest.raises(UserError, match="The store is complete without it"):
        prepare("csv", log, tmp_path / "s", item_info=write(tmp_path / "i.csv", "item,b\nx,2\n"))
    assert Store.open(tmp_path / "s").num_items == 3
    with pytest.raises(UserError, match="give the table with --item-info"):
        prepare("csv", log, tmp_path / "t", item_info_title="title")


def test_a_store_that_extends_another_takes_over_its_titles(store: Store, tmp_path: Path) -> None:
    add_item_info(store, write(tmp_path / "movies.csv", MOVIES))
    longer = write(tmp_path / "longer.csv", LOG + "1,0,1800000000\n2,0,1800000000\n")
    extended = prepare("csv", longer, tmp_path / "longer", extend=store.path)
    info = ItemInfo.of(extended)
    assert info is not None and info.titles_of([0, 1, 3]) == [None, "Toy Story (1995)", "Heat, The (1995)"]
    assert info.account.missing == 2


def test_the_command_adds_titles_and_inspect_shows_them(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    movies = write(tmp_path / "movies.csv", MOVIES.replace("Toy Story", "Toy\x1bStory"))
    assert cli.main(["item-info", str(store.path), str(movies)]) == 0
    assert "2 of 3 items have a record" in capsys.readouterr().out
    assert cli.main(["inspect", str(store.path), "--json", str(tmp_path / "x.json")]) == 0
    out = capsys.readouterr().out
    assert '1 "Toy\\x1bStory (1995)" (Animation): 3 events' in out and '"Heat, The (1995)"' in out and "\x1b" not in out
    assert "titles from 'title', also 'genres'" in out
    assert json.loads((tmp_path / "x.json").read_text())["top_items"] == [[1, 3], [2, 3], [3, 3]]


def test_python_has_the_same(store: Store, tmp_path: Path) -> None:
    info = turbogr.add_item_info(store.path, write(tmp_path / "movies.csv", MOVIES))
    assert info.titles([0]) == ["Toy Story (1995)"]
