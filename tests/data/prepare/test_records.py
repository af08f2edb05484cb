"""Values at the edge of what a row can hold: each is kept exactly, refused in a sentence, or dropped and counted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pyarrow as pa
import pytest

from turbogr.cli import main
from turbogr.data.prepare.data_warnings import DataWarning
from turbogr.data.prepare.preparation import prepare, prepare_table
from turbogr.data.store import Store
from turbogr.errors import UserError

pytestmark = [pytest.mark.filterwarnings(f"ignore:{start}") for start in ("leave-two-out", "most times")]

YEAR_50000 = 1_515_701_280_000  # seconds
YEAR_BEFORE_1 = -70_000_000_000


def table(**columns: object) -> pa.Table:
    return pa.table({"user_id": [1, 2, 1, 2], "item_id": [5, 6, 7, 8], "timestamp": [1, 2, 3, 4], **columns})


def prepare_csv(folder: Path, text: str, **options: object) -> Store:
    (folder / "log.csv").write_text(text)
    return prepare("csv", folder / "log.csv", folder / "store", overwrite=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("moment", "reason"), [(YEAR_50000, "time after the year 2200"), (YEAR_BEFORE_1, "negative")])
@pytest.mark.parametrize(
    ("kind", "per_second"),
    [
        (pa.timestamp("s"), 1),
        (pa.timestamp("s", tz="UTC"), 1),
        (pa.timestamp("ms"), 10**3),
        (pa.timestamp("us"), 10**6),
        (pa.date32(), 1 / 86400),
        (pa.date64(), 10**3),
    ],
)
def test_a_year_that_python_cannot_write(
    tmp_path: Path, kind: pa.DataType, per_second: float, moment: int, reason: str
) -> None:
    days = [day * 86400 for day in (1, moment // 86400, 2, 3)]
    raw = pa.array([round(day * per_second) for day in days], pa.int32() if kind == pa.date32() else pa.int64())
    log = table(timestamp=raw.view(kind))
    with pytest.raises(UserError, match=rf"row 2 of the table: the time .*{reason.removeprefix('time ')}"):
        prepare_table(log, tmp_path / "store")
    account = prepare_table(log, tmp_path / "store", drop_bad_rows=True).manifest.account
    assert account["rows_kept"] == 3
    assert list(account["dropped"].values()) == [1]
    assert next(iter(account["dropped"])).startswith(reason)


HEADER = "user_id,item_id,timestamp\n"


@pytest.mark.parametrize(
    "wrong", ["9" * 5000, "-" + "9" * 5000, "9223372036854775808", "-9223372036854775809", "9" * 20]
)
def test_an_integer_beyond_64_bits_however_long(tmp_path: Path, wrong: str) -> None:
    log = HEADER + f"1,5,1\n2,{wrong},2\n1,9223372036854775807,3\n2,-9223372036854775808,4\n"
    with pytest.raises(UserError, match=r"line 3: the item .* does not fit 64 bits") as raised:
        prepare_csv(tmp_path, log)
    assert len(str(raised.value)) < 400
    store = prepare_csv(tmp_path, log, drop_bad_rows=True)
    assert store.manifest.account["dropped"] == {"integer beyond 64 bits": 1}
    assert store.item_ids.decode([0, 1, 2]).tolist() == [-(2**63), 5, 2**63 - 1]


def test_a_dropped_record_is_not_read_as_a_long_integer(tmp_path: Path) -> None:
    log = HEADER + f",a text id of more than 18 letters,1\n1,{'9' * 30},2\n1,5,3\n2,6,4\n"
    store = prepare_csv(tmp_path, log, drop_bad_rows=True)
    assert store.manifest.account["dropped"] == {"integer beyond 64 bits": 1, "missing user": 1}
    assert store.item_ids.kind == "integer"


def test_the_output_names_days_written_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = HEADER + "1,5,20220501\n2,6,20220502\n1,7,20220503\n1,6,20220504\n"
    store = prepare_csv(tmp_path, log)
    assert store.times[-1] == 1_651_449_600
    assert main(["prepare", "csv", str(tmp_path / "log.csv"), "--out", str(tmp_path / "again")]) == 0
    assert "time from 'timestamp' (YYYYMMDD)" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [2**53 + 1, -(2**53) - 1, 2**53])
def test_a_kept_integer_that_a_float_cannot_hold_is_refused(tmp_path: Path, wrong: int) -> None:
    values = [1, wrong, 2**53 - 1, 1 - 2**53]
    for column in (pa.array(values), pa.array([str(value) for value in values])):
        log = table(watched=column)
        with pytest.raises(UserError, match=f"row 2 of the table: '{wrong}' in column 'watched'"):
            prepare_table(log, tmp_path / "store", keep_columns=["watched"], overwrite=True)
        store = prepare_table(log, tmp_path / "store", keep_columns=["watched"], drop_bad_rows=True, overwrite=True)
        assert sorted(store.actions["watched"].tolist()) == [1 - 2**53, 1, 2**53 - 1]


def warned(folder: Path, text: str, **options: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_csv(folder, text, time_unit="s", **options)
    doubts = [str(warning.message) for warning in caught if warning.category is DataWarning]
    return [doubt for doubt in doubts if "leave-two-out" not in doubt]


@pytest.mark.parametrize("word", ["NULL", "NaN", "None", "N/A", "<NA>", "\\N", "-"])
def test_ids_that_look_missing_are_counted_in_a_warning(tmp_path: Path, word: str) -> None:
    (sentence,) = warned(tmp_path, HEADER + f"1,a,1\n2,{word},2\n1,b,3\n1,{word},4\n2,nanna,5\n")
    assert sentence.startswith("2 events name an item that looks like a missing value")
    assert repr(word) in sentence
    (sentence,) = warned(tmp_path, HEADER + f"a,1,1\n{word},2,2\n{word},3,3\nb,3,4\n{word},3,5\n")
    assert sentence.startswith("3 events name a user that looks")


def test_spaces_around_ids_are_a_warning(tmp_path: Path) -> None:
    log = HEADER + "1, a,1\n2, b,2\n1,c ,3\n1,d e,4\n2,   ,5\n"
    missing, spaces = warned(tmp_path, log)
    assert missing.startswith("1 event names an item that looks")
    assert spaces == "4 of 5 item ids begin or end with spaces, which are kept as part of them"


def test_usual_ids_are_no_matter(tmp_path: Path) -> None:
    assert warned(tmp_path, HEADER + "1,a,1\n2,b,2\n1,banana,3\n") == []
    assert warned(tmp_path, HEADER + "1,5,1\n2,6,2\n1,7,3\n") == []
