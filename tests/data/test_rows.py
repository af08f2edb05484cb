"""Values at the edge of what a row can hold: each is kept exactly, refused in a sentence, or dropped and counted."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from turbogr.data.prepare import prepare, prepare_table
from turbogr.data.store import Store
from turbogr.errors import UserError

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
    with pytest.raises(UserError, match=rf"row 1 of the table: the time .*{reason.removeprefix('time ')}"):
        prepare_table(log, tmp_path / "store")
    account = prepare_table(log, tmp_path / "store", drop_bad_rows=True).manifest.account
    assert account["rows_kept"] == 3
    assert list(account["dropped"].values()) == [1]
    assert next(iter(account["dropped"])).startswith(reason)
