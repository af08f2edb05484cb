"""A user and all items of the user per line, in time order: how S3Rec, P5 and TIGER distribute their sets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turbogr.data.prepare.columns import choose_columns
from turbogr.data.prepare.source import (
    DROPPING,
    NO_COLUMN,
    OF_FILES,
    Block,
    Columns,
    ReadOptions,
    Source,
    register_built_in,
)
from turbogr.data.prepare.sources.delimited import Layout, Lines, read_lines
from turbogr.data.prepare.sources.input_files import find_files, plain_name
from turbogr.data.split import LEAVE_TWO_OUT
from turbogr.errors import UserError, excerpt

_LAYOUT = Layout(" ", ("user", "item"), quoted=False)
_NAMES = ("user", "item")
_WHAT = "files of `user item item ...` lines"
_USUAL_FILE = "sequential_data.txt"


@dataclass
class ItemListReader:
    """Reads lines of a user and the user's items, which become one record per item."""

    files: Sequence[Path]
    columns: Columns
    options: ReadOptions
    texts_may_be_numbers: bool = True
    unit: str = "B"

    def __post_init__(self) -> None:
        self.size = sum(file.stat().st_size for file in self.files)

    def blocks(self) -> Iterator[Callable[[], Block]]:
        for file in self.files:
            for lines in read_lines(file, _LAYOUT):
                yield partial(self._parse, file, lines)

    def _parse(self, file: Path, lines: Lines) -> Block:
        if re.search(rb"\r(?!\n)", lines.data):
            raise UserError(f"{file}: lines end with a bare carriage return; convert the line ends (tr '\\r' '\\n')")
        users: list[bytes] = []
        items: list[bytes] = []
        counts: list[int] = []
        numbers: list[int] = []
        dropped = 0
        for number, line in enumerate(lines.data.split(b"\n"), lines.first):
            fields = line.split()
            if len(fields) > 1:
                users.append(fields[0])
                items += fields[1:]
                counts.append(len(fields) - 1)
                numbers.append(number)
            elif fields and self.options.drop_bad_rows:
                dropped += 1
            elif fields:
                shown = excerpt(fields[0].decode("utf-8", "replace"))
                raise UserError(
                    f"{file}, line {number}: {shown} stands alone; a line must be a user and the user's items, "
                    f"separated by spaces or tabs {DROPPING}"
                )
        lengths = np.array(counts, np.int64)
        columns = {
            "user": pa.array(users, pa.binary()).take(pa.array(np.repeat(np.arange(len(users)), lengths))),
            "item": pa.array(items, pa.binary()),
        }
        return Block(
            columns={name: columns[name] for name in self.columns.names},
            where=partial(_where, file, np.array(numbers, np.int64), np.cumsum(lengths)),
            progress=lines.progress,
            dropped={"user without items": dropped} if dropped else {},
        )


def _where(file: Path, numbers: NDArray[np.int64], ends: NDArray[np.int64], record: int) -> str:
    return f"{file}, line {numbers[np.searchsorted(ends, record, side='right')]}"


def open_item_lists(paths: Sequence[Path], options: ReadOptions) -> ItemListReader:
    """Open `user item item ...` lines; a folder must hold one such file, since each set numbers its items from 1."""
    files = [_only_file(path) if path.is_dir() else path for path in paths]
    files = find_files(files, (".txt",), _WHAT)
    options = dataclasses.replace(options, time_column=NO_COLUMN)
    return ItemListReader(files, choose_columns(_NAMES, options, str(files[0])), options)


def _only_file(folder: Path) -> Path:
    found = find_files([folder], (".txt",), _WHAT)
    usual = [file for file in found if plain_name(file) == _USUAL_FILE]
    if len(usual or found) > 1:
        named = ", ".join(file.name for file in found[:5]) + (" and others" if len(found) > 5 else "")
        raise UserError(f"{folder} holds {named}; each set has ids of its own, so name the file to read")
    return (usual or found)[0]


register_built_in(
    Source("p5", "'user item item ...' per line in time order", open_item_lists, OF_FILES, split=LEAVE_TWO_OUT)
)
