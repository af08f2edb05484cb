"""Delimited text as people have it: other encodings, decimal commas, byte-order marks, and the remedy in a message."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from turbogr.data.prepare import preparation
from turbogr.data.prepare.preparation import prepare
from turbogr.data.prepare.sources import delimited
from turbogr.data.store import Store
from turbogr.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

T = 1_650_000_000
LOG = f"user_id;item_id;rating;timestamp\nJosé;Café;4,5;{T}\nZoë;Tea;3;{T + 1}\nJosé;Tea;2,5;{T + 2}\n"


def prepared(folder: Path, data: bytes, **options: object) -> Store:
    (folder / "log.csv").write_bytes(data)
    return prepare("csv", folder / "log.csv", folder / "store", overwrite=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-8-sig", "UTF8"])
def test_a_text_of_another_encoding(tmp_path: Path, encoding: str) -> None:
    store = prepared(tmp_path, LOG.encode(encoding), encoding=encoding)
    assert store.user_ids.decode([0, 1]).tolist() == ["José", "Zoë"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_says_which_encoding_it_is(tmp_path: Path, encoding: str) -> None:
    store = prepared(tmp_path, LOG.encode(encoding))
    assert store.user_ids.decode([0, 1]).tolist() == ["José", "Zoë"]


def test_pieces_may_end_within_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_PIECE", 7)
    assert prepared(tmp_path, LOG.encode("utf-16")).num_events == 3
    with pytest.raises(UserError, match="its byte-order mark says"):
        prepared(tmp_path, LOG.encode("utf-16")[:-1])


def test_a_line_is_named_in_another_encoding_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.csv, line 4: the time 'noon'"):
        prepared(tmp_path, LOG.replace(str(T + 2), "noon").encode("utf-16"))


@pytest.mark.parametrize("encoding", ["elephant", "rot13", "base64", 7])
def test_no_encoding(tmp_path: Path, encoding: object) -> None:
    with pytest.raises(UserError, match=r"there is no encoding .*; usual ones are utf-8, latin-1"):
        prepared(tmp_path, LOG.encode(), encoding=encoding)


def test_a_text_that_is_not_of_the_encoding(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not in the encoding that --encoding utf-16 says"):
        prepared(tmp_path, LOG.encode("latin-1"), encoding="utf-16")


def test_latin_1_that_is_read_as_utf_8_has_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not UTF-8: b'Jos\\xe9', which is 'José' in Latin-1; --encoding latin-1"):
        prepared(tmp_path, LOG.encode("latin-1"))
    with pytest.raises(UserError, match=r"line 1: the header is not UTF-8; .*--encoding latin-1"):
        prepared(tmp_path, LOG.replace("rating", "Note für").encode("latin-1"))
    with pytest.raises(UserError, match=r"not UTF-8: b'Jos\\x80'") as refused:  # a euro sign is no letter
        prepared(tmp_path, LOG.encode("latin-1").replace(b"\xe9", b"\x80"))
    assert "--encoding" not in str(refused.value)


@pytest.mark.parametrize("mark", ["comma", ","])
def test_decimal_commas(tmp_path: Path, mark: str) -> None:
    store = prepared(tmp_path, LOG.encode(), keep_columns="rating", decimal=mark, where="rating >= 2.5")
    assert store.actions["rating"].tolist() == [4.5, 2.5, 3.0]


def test_decimal_commas_have_the_remedy(tmp_path: Path) -> None:
    for options in ({"keep_columns": "rating"}, {"where": "rating > 3"}):
        with pytest.raises(UserError, match=r"'4,5' in column 'rating' is not a number .*say --decimal comma"):
            prepared(tmp_path, LOG.encode(), **options)
    with pytest.raises(UserError, match=r"'four' in column 'rating'") as refused:
        prepared(tmp_path, LOG.replace("4,5", "four").encode(), keep_columns="rating")
    assert "--decimal" not in str(refused.value)
    with pytest.raises(UserError, match="--decimal must be point or comma, got 'semicolon'"):
        prepared(tmp_path, LOG.encode(), decimal="semicolon")


def test_times_with_decimal_commas(tmp_path: Path) -> None:
    log = LOG.replace(str(T), f"{T},75").replace(str(T + 1), f"{T + 1},5").encode()
    with pytest.raises(UserError, match=r"the time '1650000000,75' .*say --decimal comma"):
        prepared(tmp_path, log)
    store = prepared(tmp_path, log, decimal="comma")
    assert store.times.tolist() == [T, T + 2, T + 1]


def test_a_byte_order_mark_quotes_and_windows_lines(tmp_path: Path) -> None:
    log = f'"user_id";"item_id";"timestamp"\r\n"a;b";"x ""y""";"{T}"\r\nc;x;{T}\r\n'
    store = prepared(tmp_path, codecs.BOM_UTF8 + log.encode())
    assert store.user_ids.decode([0, 1]).tolist() == ["a;b", "c"]
    assert store.item_ids.decode([1]).tolist() == ['x "y"']


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("01.05.2022 12:30", "for instance --time-format '%d.%m.%Y %H:%M'"),
        ("1/5/2022", "for instance --time-format '%d/%m/%Y' or --time-format '%m/%d/%Y'"),
        ("1/5/2022 12:30:00", "--time-format '%m/%d/%Y %H:%M:%S'"),
    ],
)
def test_a_date_with_the_year_at_its_end_has_the_remedy(tmp_path: Path, written: str, words: str) -> None:
    log = "user_id,item_id,timestamp\n" + "".join(f"{k % 2},{k},{written}\n" for k in range(4))
    with pytest.raises(UserError) as refused:
        prepared(tmp_path, log.encode())
    assert words in str(refused.value)
    format = words.split("'")[-2]
    assert prepared(tmp_path, log.encode(), time_format=format).num_events == 4


def test_options_of_text_are_refused_by_other_sources(tmp_path: Path) -> None:
    for options in ({"encoding": "latin-1"}, {"decimal": "comma"}):
        with pytest.raises(UserError, match=f"--{next(iter(options))} is not an option of the source 'parquet'"):
            preparation.prepare("parquet", tmp_path, tmp_path / "store", **options)  # type: ignore[arg-type]
