"""JSON lines: one object per line, read in blocks of whole lines.

Arrow parses a block at once. If that fails, Python reads the block line by line, to find the wrong line and the reason.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from turbogr.data.prepare.columns import choose_columns
from turbogr.data.prepare.source import DROPPING, OF_TYPED_FILES, Block, Columns, ReadOptions, Source, register_built_in
from turbogr.data.prepare.sources.delimited import Layout, Lines, read_lines
from turbogr.data.prepare.sources.input_files import find_files
from turbogr.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json")
_LINES = Layout("\n", quoted=False)
_SAMPLE = 1000
_OBJECTS_SIDE_BY_SIDE = re.compile(rb"\}[ \t\r]*\{")


@dataclass
class JsonLinesReader:
    """Reads objects whose chosen fields have the types seen in the first lines."""

    files: Sequence[Path]
    columns: Columns
    options: ReadOptions
    schema: pa.Schema
    texts_may_be_numbers: bool = False
    unit: str = "B"

    def __post_init__(self) -> None:
        self.size = sum(file.stat().st_size for file in self.files)

    def blocks(self) -> Iterator[Callable[[], Block]]:
        for file in self.files:
            for lines in read_lines(file, _LINES):
                yield partial(self._parse, file, lines)

    def _parse(self, file: Path, lines: Lines) -> Block:
        table = self._parse_at_once(lines)
        numbers: list[int] | None = None
        if table is None:
            columns, numbers, dropped = self._parse_slowly(file, lines)
        else:
            columns, dropped = {name: table[name].combine_chunks() for name in self.columns.names}, {}
        return Block(columns, partial(_where, file, lines, numbers), lines.progress, dropped)

    def _parse_at_once(self, lines: Lines) -> pa.Table | None:
        """Parse with Arrow; None where it fails, or where a row of its table may be something else than a line."""
        if _OBJECTS_SIDE_BY_SIDE.search(lines.data):
            return None
        try:
            table = pajson.read_json(
                pa.BufferReader(lines.data),
                pajson.ReadOptions(use_threads=False, block_size=len(lines.data) + 1),
                pajson.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowInvalid:
            return None
        num_lines = lines.data.count(b"\n") + (not lines.data.endswith(b"\n"))
        whole = table.num_rows == num_lines or table.num_rows == sum(1 for _ in _numbered(lines))
        return table if whole else None

    def _parse_slowly(self, file: Path, lines: Lines) -> tuple[dict[str, pa.Array], list[int], dict[str, int]]:
        """Parse line by line; returns the columns, the line numbers of the records, and what was dropped."""
        records: list[_Record] = []
        numbers: list[int] = []
        dropped: Counter[str] = Counter()
        for number, line in _numbered(lines):
            problem, record = _read_object(line)
            problem = problem or self._problem(record)
            if problem is None:
                records.append(record)
                numbers.append(number)
            elif self.options.drop_bad_rows:
                dropped[problem.reason] += 1
            else:
                raise problem.error(file, number)
        columns = {
            name: _column([record.get(name) for record in records], self.schema.field(name).type, self._as_text(name))
            for name in self.columns.names
        }
        return columns, numbers, dict(dropped)

    def _as_text(self, name: str) -> bool:
        """Whether a field holds ids that are to be text, so that integers and texts may be mixed."""
        return self.options.text_ids and name in (self.columns.user, self.columns.item)

    def _problem(self, record: _Record) -> _Problem | None:
        for name in self.columns.names:
            if name in record.repeated:
                return _Problem("repeated field", f"field {name!r} occurs twice")
            value, kind = record.get(name), self.schema.field(name).type
            if value is None or (self._as_text(name) and _type_of(value) in (pa.int64(), pa.string())):
                continue
            is_id = name in (self.columns.user, self.columns.item)
            if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
                remedy = "; --text-ids treats ids as text" if is_id else ""
                sentence = f"the number {json.dumps(value)[:60]} in field {name!r} does not fit 64 bits{remedy}"
                return _Problem("integer beyond 64 bits", sentence)
            if is_id and isinstance(value, float) and kind == pa.int64():
                return _Problem("value of another type", f"field {name!r} is {value}, but ids must be integers or text")
            if _type_of(value) != kind and not (_is_number(value) and kind in (pa.int64(), pa.float64())):
                shown = json.dumps(value)[:60]
                return _Problem(
                    "value of another type", f"field {name!r} is {shown}, but other lines have {_called(kind)} there"
                )
        return None


@dataclass(frozen=True)
class _Problem:
    """What is wrong with a line: the reason under which it is counted, and the sentence for the user."""

    reason: str
    sentence: str

    def error(self, file: Path, line: int) -> UserError:
        return UserError(f"{file}, line {line}: {self.sentence} {DROPPING}")


def _column(values: list[Any], kind: pa.DataType, as_text: bool) -> pa.Array:
    """Make a column of type `kind`; integers become decimals where some values are, and text with `as_text`."""
    if as_text:
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    if any(isinstance(value, float) for value in values) and not pa.types.is_string(kind):
        kind = pa.float64()
    return pa.array(values, kind)


def _numbered(lines: Lines) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers."""
    for number, line in enumerate(lines.data.split(b"\n"), lines.first):
        if line.strip():
            yield number, line


def _where(file: Path, lines: Lines, numbers: list[int] | None, record: int) -> str:
    number = numbers[record] if numbers is not None else next(islice(_numbered(lines), record, None))[0]
    return f"{file}, line {number}"


class _Record(dict[str, Any]):
    """An object of JSON; `repeated` are the fields that it names more than once."""

    repeated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Record:
        record = cls(pairs)
        if len(record) < len(pairs):
            record.repeated = frozenset(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return record


def _read_object(line: bytes) -> tuple[_Problem | None, _Record]:
    """Return what is wrong with a line, or None and its object."""
    try:
        record = json.loads(line, object_pairs_hook=_Record.of)
        if b"\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return _Problem("broken UTF-8", "the line is not UTF-8"), _Record()
    except UnicodeEncodeError:
        sentence = "a text holds half of a surrogate pair, which is not valid Unicode"
        return _Problem("broken Unicode", sentence), _Record()
    except (ValueError, RecursionError) as error:
        return _Problem("not JSON", f"not JSON: {error}"), _Record()
    if not isinstance(record, _Record):
        return _Problem("not a JSON object", "the line is not a JSON object"), _Record()
    return None, record


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _type_of(value: object) -> pa.DataType | None:
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    return pa.string() if isinstance(value, str) else None


def _called(kind: pa.DataType) -> str:
    return "text" if pa.types.is_string(kind) else "a boolean" if pa.types.is_boolean(kind) else "a number"


def _sample(file: Path, drop_bad_rows: bool) -> list[tuple[int, _Record]]:
    """Return the first objects of a file with their lines; a wrong one before them is an error or dropped."""
    records = []
    for number, line in islice(_numbered(next(read_lines(file, _LINES))), _SAMPLE):
        problem, record = _read_object(line)
        if problem is None:
            records.append((number, record))
        elif not records and not drop_bad_rows:
            raise problem.error(file, number)
    if not records:
        raise UserError(f"{file} holds no records" + (" that can be read at its beginning" if drop_bad_rows else ""))
    return records


def open_jsonl(
    paths: Sequence[Path], options: ReadOptions, choose: Callable[[list[str]], ReadOptions] | None = None
) -> JsonLinesReader:
    """Open files of JSON lines; `choose` may fill in column names from those that are there."""
    files = find_files(paths, SUFFIXES, "files of JSON lines")
    sample = _sample(files[0], options.drop_bad_rows)
    names = list(dict.fromkeys(name for _, record in sample for name in record))
    columns = choose_columns(names, choose(names) if choose else options, str(files[0]))
    fields = []
    for name in columns.names:
        shown = sample
        if all(record.get(name) is None for _, record in sample):
            shown = _first_with(files, name) or sample
        kind = _type_of_field(files[0], shown, name, name in (columns.user, columns.item), options)
        fields.append(pa.field(name, kind))
    return JsonLinesReader(files, columns, options, pa.schema(fields))


def _first_with(files: Sequence[Path], name: str) -> list[tuple[int, _Record]]:
    """Return the first object of all files in which a field has a value."""
    for file in files:
        for lines in read_lines(file, _LINES):
            for number, line in _numbered(lines):
                problem, record = _read_object(line)
                if problem is None and record.get(name) is not None:
                    return [(number, record)]
    return []


def _type_of_field(
    file: Path, sample: list[tuple[int, _Record]], name: str, is_id: bool, options: ReadOptions
) -> pa.DataType:
    """Return the type of a field: the one of all lines, or the most common one where others are to be dropped.

    Times and actions may mix integers and decimals; ids may not.
    """
    kinds = [(number, _type_of(record[name])) for number, record in sample if record.get(name) is not None]
    if not is_id and any(kind == pa.float64() for _, kind in kinds):
        kinds = [(number, pa.float64() if kind == pa.int64() else kind) for number, kind in kinds]
    if not kinds:
        return pa.string()
    counts = Counter(kind for _, kind in kinds if kind is not None)
    if is_id and options.text_ids and set(counts) == {pa.int64(), pa.string()}:
        return pa.string()
    if counts and options.drop_bad_rows:
        return counts.most_common(1)[0][0]
    if len(counts) < len({kind for _, kind in kinds}):
        raise UserError(f"{file}: field {name!r} holds lists or objects; it must be a number or text")
    usual = kinds[0][1]
    if is_id and set(counts) == {pa.int64(), pa.float64()}:
        usual = pa.int64()  # also if decimals come first: they cannot be ids
    elif len(counts) > 1:
        number, other = next((number, kind) for number, kind in kinds if kind != usual)
        remedy = "; --text-ids takes both as text" if is_id and set(counts) == {pa.int64(), pa.string()} else ""
        raise UserError(
            f"{file}, line {number}: field {name!r} is {_called(other)} here and {_called(usual)} in earlier lines"
            f"{remedy}"
        )
    return usual


register_built_in(Source("jsonl", "JSON lines, one object per event", open_jsonl, OF_TYPED_FILES))
