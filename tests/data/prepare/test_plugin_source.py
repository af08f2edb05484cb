"""Sources of plug-ins: what they may yield, and what is said of what they may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import turbogr
from tests.data.logs import bytes_of, random_events, stored_sequences, write_csv
from turbogr import plugins
from turbogr.cli import main
from turbogr.data.prepare.source import OF_ANY_LOG, Block, Source
from turbogr.data.prepare.sources.delimited import open_csv
from turbogr.errors import UserError
from turbogr.plugins import register

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

START = 1_650_000_000
COLUMNS = {
    "user_id": ["u", "u", "v", "v"],
    "item_id": ["a", "b", "b", "a"],
    "timestamp": [START, START + 1, START, START + 1],
}


@pytest.fixture(autouse=True)
def forget_mine() -> Iterator[None]:
    """Forget the source that a test registers."""
    yield
    plugins._components.pop(("source", "mine", None), None)


def yields(*blocks: Any) -> None:
    """Register the source "mine", which yields these blocks."""

    @register("source", "mine")
    def read(paths: list[Path]) -> Iterator[Any]:
        yield from blocks


def prepare(tmp_path: Path, **options: Any) -> turbogr.Store:
    return turbogr.prepare("mine", [], tmp_path / "store", **options)


@pytest.mark.parametrize(
    "convert", [list, np.array, pa.array, lambda values: pa.chunked_array([values[:1], values[1:]])]
)
def test_columns_of_any_kind(tmp_path: Path, convert: Any) -> None:
    yields({name: convert(values) for name, values in COLUMNS.items()})
    assert stored_sequences(prepare(tmp_path)) == {
        "u": [("a", START), ("b", START + 1)],
        "v": [("b", START), ("a", START + 1)],
    }


def test_a_store_is_that_of_the_same_log_as_csv(tmp_path: Path) -> None:
    events = [(user, item, START + time) for user, item, time in random_events(500, 20, 30, seed=3)]
    users, items, times = (np.array(column) for column in zip(*events, strict=True))
    cuts = [(0, 7), (7, 7), (7, 300), (300, 500)]  # one block is empty
    yields(*({"user_id": users[a:b], "item_id": items[a:b], "timestamp": times[a:b]} for a, b in cuts))
    mine = bytes_of(prepare(tmp_path, min_item_events=5, ties="random"))
    log = write_csv(tmp_path / "log.csv", events)
    other = bytes_of(turbogr.prepare("csv", log, tmp_path / "other", min_item_events=5, ties="random"))
    for name in ("manifest.json", "checksums.json"):  # the source is named, and the manifest has a checksum
        del mine[name], other[name]
    assert mine == other


def test_a_class_with_a_block_that_names_its_records(tmp_path: Path) -> None:
    @register("source", "mine")
    class Mine:
        def __init__(self, paths: list[Path]) -> None:
            self.name = paths[0].name

        def __iter__(self) -> Iterator[Block]:
            columns = {**COLUMNS, "timestamp": [START, "soon", START, START]}
            yield Block({k: list(map(str, v)) for k, v in columns.items()}, lambda k: f"{self.name}, page {k}")  # type: ignore[misc]

    with pytest.raises(UserError, match=r"^book, page 1: the time 'soon' .*\(--drop-bad-rows drops and counts"):
        turbogr.prepare("mine", [tmp_path / "book"], tmp_path / "store")
    store = turbogr.prepare("mine", [tmp_path / "book"], tmp_path / "store", drop_bad_rows=True)
    assert store.manifest.account == {"rows_in": 4, "rows_kept": 3, "dropped": {"unreadable time": 1}}


def test_a_record_is_named_by_its_number(tmp_path: Path) -> None:
    yields(COLUMNS, {**COLUMNS, "user_id": ["u", None, "v", "v"]})
    with pytest.raises(UserError, match="source 'mine', record 6: the user"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "the source 'mine' yields no records"),
        ([{}], "the source 'mine' yields dict; yield mappings"),
        ([("u", "a", 1)], "the source 'mine' yields tuple; yield mappings"),
        ([{"user_id": [1], "item_id": [1]}], "source 'mine': no column looks like the time"),
        (
            [{**COLUMNS, "item_id": ["a"]}],
            "record 1 on: the columns have different lengths: {'user_id': 4, 'item_id': 1",
        ),
        ([COLUMNS, {"user_id": [1], "item_id": [1]}], "record 5 on: there is no column 'timestamp'"),
        ([{**COLUMNS, "item_id": ["a", 1, "b", []]}], "column 'item_id' of source 'mine'"),
    ],
)
def test_what_is_no_block(tmp_path: Path, blocks: list[Any], message: str) -> None:
    yields(*blocks)
    with pytest.raises(UserError, match=re.escape(message)):
        prepare(tmp_path)
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Options:
    mark: str | None = None
    step: float = 1.0

    def check(self) -> None:
        if self.step <= 0:
            raise UserError(f"step must be positive, got {self.step}")


def register_with_options(seen: list[Options]) -> None:
    @register("source", "mine", config=Options)
    def read(paths: list[Path], options: Options) -> Iterator[Any]:
        seen.append(options)
        yield COLUMNS


def test_own_options_are_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Options] = []
    register_with_options(seen)
    command = ["prepare", "mine", "--out", str(tmp_path / "store"), "--overwrite"]
    assert main([*command, "--option", "mark=|", "--option", "step=2"]) == 0
    assert set(seen) == {Options("|", 2.0)}
    assert main([*command, "--option", "mark=007"]) == 0
    assert seen[-1] == Options("007", 1.0)
    capsys.readouterr()
    for setting, message in (
        ("step=x", "source 'mine': step takes a number, got 'x'"),
        ("step=0", "step must be positive, got 0.0"),
        ("step=[", "cannot read the value '[' in --option step=["),
        ("step", "cannot read --option step; write it as key=value"),
        ("stp=1", "--option stp is not an option of the source 'mine', which takes --keep-columns"),
    ):
        assert main([*command, "--option", setting]) == 2
        assert message in capsys.readouterr().err
    assert main([*command, "--delimiter", ";"]) == 2
    assert "--delimiter is not an option of the source 'mine'" in capsys.readouterr().err


def test_an_option_of_prepare_cannot_be_one_of_a_source(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Clashing:
        split: str = "x"

    register("source", "mine", config=Clashing)(lambda paths, options: [COLUMNS])
    with pytest.raises(UserError, match="the source 'mine' has an option 'split', which `prepare` has already"):
        prepare(tmp_path)


def test_a_plug_in_may_register_a_whole_source(tmp_path: Path) -> None:
    register("source", "mine")(Source("mine", "CSV in pairs", open_csv, OF_ANY_LOG, split="leave-one-out"))
    log = write_csv(tmp_path / "log.csv", [("u", "a", 1), ("u", "b", 2), ("v", "a", 1), ("v", "b", 2)])
    store = turbogr.prepare("mine", log, tmp_path / "store")
    assert store.manifest.split == "leave-one-out"
    assert store.manifest.settings["plugin"]["origin"] == __name__
    with pytest.raises(UserError, match="--drop-bad-rows is not an option of the source 'mine'"):
        turbogr.prepare("mine", log, tmp_path / "store", drop_bad_rows=True)


def test_an_unknown_source_names_the_nearest_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Did you mean 'parquet'\?.*--plugins"):
        turbogr.prepare("parkett", [], tmp_path / "store")
