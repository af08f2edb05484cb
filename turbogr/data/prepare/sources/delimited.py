"""Delimited text (CSV, TSV and the formats of the public data sets), read in blocks of whole lines.

The file is cut at line ends here and parsed by Arrow, so every block knows its first line and an error can name the
line of a bad record. Quoted fields may contain line ends; a quote that never closes is an error.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from turbogr.data.prepare.columns import check_columns, choose_columns, refuse_doubled
from turbogr.data.prepare.source import (
    DECIMALS,
    DROPPING,
    OF_TEXT_FILES,
    QUOTES,
    Block,
    Columns,
    ReadOptions,
    Source,
    register_built_in,
)
from turbogr.data.prepare.sources.input_files import find_files, read_pieces
from turbogr.errors import UserError

_PIECE = 1 << 24
_LONGEST_QUOTED = 1 << 26
_UNIT_SEPARATOR = "\x1f"
_LONGEST_NAME = 1 << 16
_LINE_END = re.compile(rb"\r\n|\n|\r")
_UNQUOTED = "say --quote=none if quotes are part of the text"
_BOMS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass(frozen=True)
class Layout:
    """How a text is cut into columns; the delimiter may be several characters.

    `names` are the columns, None if the first line names them. `encoding` is None for UTF-8, or what a byte-order mark
    says.
    """

    delimiter: str
    names: tuple[str, ...] | None = None
    quoted: bool = True
    encoding: str | None = None


@dataclass
class DelimitedReader:
    """Reads files of one layout; `columns` are raw names that every file must have."""

    files: Sequence[Path]
    layout: Layout
    columns: Columns
    options: ReadOptions
    rename: Callable[[str], str] = str
    texts_may_be_numbers: bool = True
    unit: str = "B"

    def __post_init__(self) -> None:
        self.size = sum(file.stat().st_size for file in self.files)

    def blocks(self) -> Iterator[Callable[[], Block]]:
        empty = True
        for file in self.files:
            names: Sequence[str] | None = None
            for lines in read_lines(file, self.layout):
                if names is None:
                    names, lines = header(lines, self.layout, file)
                    names = [self.rename(name) for name in names]
                    refuse_doubled(names, f"{file}, line 1")
                    check_columns(self.columns, names, str(file))
                if lines.data:
                    empty = False
                    yield partial(self._parse, file, lines, names)
        if empty:
            raise UserError(f"{self.files[0]} holds no records")

    def _parse(self, file: Path, lines: Lines, names: Sequence[str]) -> Block:
        wanted = {name: f"c{names.index(name)}" for name in self.columns.names}
        _check_quotes(lines, self.layout, file)
        table, ragged = _parse_block(lines, len(names), list(wanted.values()), self.layout)
        if ragged and not self.options.drop_bad_rows:
            line, message = lines.line_of(ragged[0][0], self.layout), ragged[0][1]
            raise UserError(f"{file}, line {line}: {message} {DROPPING}")
        skipped = [record for record, _ in ragged]
        return Block(
            columns={name: _one_chunk(table[column]) for name, column in wanted.items()},
            where=lambda k: f"{file}, line {lines.line_of(_original(k, skipped), self.layout)}",
            progress=lines.progress,
            dropped={"ragged row": len(ragged)} if ragged else {},
        )


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file; `first` is the number of the first (from 1), `plain`: all quotes in them are right."""

    data: bytes
    first: int
    progress: int
    plain: bool = False

    def line_of(self, record: int, layout: Layout) -> int:
        """Return the line on which a record of this block, counted from 0, starts; only messages need it."""
        line, found = self.first, -1
        for text in _records(self.data, layout):
            if text.strip(b"\r\n"):
                found += 1
            if found == record:
                break
            line += text.count(b"\n")
        return line


def _records(data: bytes, layout: Layout) -> Iterator[bytes]:
    """Yield the records of a block with their line ends, blank lines included."""
    start = 0
    quoted = _quoted_fields(layout) if layout.quoted else None
    while start < len(data):
        end = _line_end(data, start)
        if quoted is not None and b'"' in data[start:end]:
            for match in quoted.finditer(data, start):
                if match.start() >= end:
                    break
                if match.end() > end:
                    end = _line_end(data, match.end())
        yield data[start:end]
        start = end


def _line_end(data: bytes, start: int) -> int:
    match = _LINE_END.search(data, start)
    return match.end() if match else len(data)


def _quoted_fields(layout: Layout) -> re.Pattern[bytes]:
    """A field that starts with a quote; group 1 is empty where it runs to the end of the data unclosed."""
    return re.compile(_quoted_text(layout) + rb'("|\Z)')


def _quoted_text(layout: Layout) -> bytes:
    """Pattern of a field that starts with a quote, up to its closing quote or the end of the data."""
    before = rb"[\n\r" + re.escape(layout.delimiter).encode() + rb"]"
    # The quote comes first in the pattern and what precedes it is checked afterwards, which skips most text quickly.
    return rb'"(?:(?<=\A")|(?<=' + before + rb'"))[^"]*(?:""[^"]*)*'


def read_lines(file: Path, layout: Layout) -> Iterator[Lines]:
    """Yield blocks of whole records of about 16 MB.

    Raises:
        UserError: the file is empty, in another encoding, or has a quote that never closes.
    """
    rest, line, waiting = b"", 1, 0
    start = True
    for piece, progress in _utf8_pieces(file, layout.encoding):
        if start:
            piece, start = piece.removeprefix(codecs.BOM_UTF8), False
        waiting += progress
        data = rest + piece
        cut, plain = _last_record_end(data, layout)
        if cut == 0:
            if len(data) > _LONGEST_QUOTED:
                raise UserError(f"{file}, line {line}: a line or quoted field of more than 64 MB; is this a text file?")
            rest = data
            continue
        yield Lines(data[:cut], line, waiting, plain)
        line += data.count(b"\n", 0, cut)
        rest, waiting = data[cut:], 0
    if start:
        raise UserError(f"{file} is empty")
    if rest:
        yield Lines(rest, line, waiting)


def _utf8_pieces(file: Path, encoding: str | None) -> Iterator[tuple[bytes, int]]:
    """Yield the content of a file in UTF-8, in pieces with the bytes of the file that each took.

    Raises:
        UserError: the text is not of that encoding.
    """
    decoder: codecs.IncrementalDecoder | None = None
    for number, (piece, progress) in enumerate(read_pieces(file, _PIECE)):
        if number == 0:
            found = encoding or next((name for mark, name in _BOMS.items() if piece.startswith(mark)), None)
            decoder = None if found is None else codecs.getincrementaldecoder(found)()
        yield (piece if decoder is None else _decoded(decoder, piece, file, encoding)), progress
    if decoder is not None:
        _decoded(decoder, b"", file, encoding, final=True)


def _decoded(
    decoder: codecs.IncrementalDecoder, piece: bytes, file: Path, encoding: str | None, final: bool = False
) -> bytes:
    try:
        return decoder.decode(piece, final).encode("utf-8")
    except UnicodeError as error:
        said = f"--encoding={encoding}" if encoding else "its byte-order mark"
        raise UserError(f"{file} is not in the encoding that {said} says ({error})") from None


def check_encoding(encoding: str | None) -> str | None:
    """Return an encoding of text by its usual name, None for UTF-8.

    Raises:
        UserError: Python knows no such encoding.
    """
    if encoding is None:
        return None
    try:
        name = codecs.lookup(str(encoding)).name
        "".encode(name)
    except (LookupError, ValueError):
        raise UserError(
            f"there is no encoding {encoding!r}; usual ones are utf-8, latin-1, cp1252 and utf-16"
        ) from None
    return None if name in ("utf-8", "utf-8-sig", "ascii") else name


def _last_record_end(data: bytes, layout: Layout) -> tuple[int, bool]:
    """Return where the last whole record ends, 0 if there is none, and whether all quotes before it are simple.

    A quoted field may continue over lines.
    """
    end = data.rfind(b"\n") + 1
    if not layout.quoted or b'"' not in data or _simply_quoted(data[:end], layout.delimiter.encode()):
        return end, True
    fields = [match.span() for match in _quoted_fields(layout).finditer(data)]
    for first, last in reversed(fields):
        if first < end <= last:  # the line ends inside of this field, so its record began before it
            end = data.rfind(b"\n", 0, first) + 1
    return end, False


def header(lines: Lines, layout: Layout, file: Path) -> tuple[Sequence[str], Lines]:
    """Split the names of the columns off the first block."""
    if layout.names is not None:
        return layout.names, lines
    record = _header_record(lines.data, layout)
    _check_quotes(Lines(record, 1, 0, lines.plain), layout, file)
    try:
        first = record.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError(
            f"{file}, line 1: the header is not UTF-8; say which encoding it is, for instance --encoding=latin-1"
        ) from None
    if "\0" in first:
        raise UserError(f"{file}, line 1: the header has zero bytes; if the text is UTF-16, say --encoding=utf-16-le")
    if re.search("\r(?!\n)", first):
        raise UserError(f"{file}: lines end with a bare carriage return; convert the line ends (tr '\\r' '\\n')")
    try:
        names = (
            next(csv.reader([first], delimiter=layout.delimiter)) if layout.quoted else first.split(layout.delimiter)
        )
    except (csv.Error, StopIteration):
        names = []
    names = [name.strip() for name in names]
    if max(map(len, names), default=0) > _LONGEST_NAME or (first and not names):
        raise UserError(
            f"{file}, line 1: the header names a column with more than {_LONGEST_NAME:,} characters; is this a text "
            "file, and are its quotes closed?"
        )
    if not any(names):
        raise UserError(f"{file}, line 1: the header is blank")
    return names, Lines(lines.data[len(record) :], lines.first + record.count(b"\n"), lines.progress, lines.plain)


def _header_record(data: bytes, layout: Layout) -> bytes:
    """Return the first record with its line end; bare carriage returns do not end it, so that `header` finds them."""
    end = data.find(b"\n") + 1 or len(data)
    if layout.quoted and b'"' in data[:end]:
        for match in _quoted_fields(layout).finditer(data):
            if match.start() >= end:
                break
            if match.end() > end:
                end = data.find(b"\n", match.end()) + 1 or len(data)
    return data[:end]


def _parse_block(lines: Lines, width: int, wanted: list[str], layout: Layout) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Parse a block into text columns; also return (record, message) of records with another number of columns."""
    ragged: list[tuple[int, str]] = []
    data, delimiter = lines.data, layout.delimiter
    if len(delimiter) > 1:
        data, delimiter = data.replace(delimiter.encode(), _UNIT_SEPARATOR.encode()), _UNIT_SEPARATOR

    def note(row: pacsv.InvalidRow) -> str:
        ragged.append((row.number - 1, f"{row.actual_columns} columns instead of {row.expected_columns}"))
        return "skip"

    def parse(data: bytes) -> pa.Table:
        return _read_csv(data, width, wanted, layout, delimiter, note)

    if _is_utf8(data):
        return parse(data), ragged
    # Arrow cannot report a ragged record that is not UTF-8. A readable copy of the text shows which are ragged.
    parse(data.decode("utf-8", "replace").encode())
    skipped = {record for record, _ in ragged}
    whole = (text for text in _records(data, layout) if text.strip(b"\r\n"))
    rest = b"".join(text for record, text in enumerate(whole) if record not in skipped)
    return (parse(rest) if rest else parse(b"\n")), ragged


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _read_csv(
    data: bytes,
    width: int,
    wanted: list[str],
    layout: Layout,
    delimiter: str,
    note: Callable[[pacsv.InvalidRow], str],
) -> pa.Table:
    return pacsv.read_csv(
        pa.BufferReader(data),
        pacsv.ReadOptions(
            column_names=[f"c{number}" for number in range(width)], use_threads=False, block_size=len(data) + 1
        ),
        pacsv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if layout.quoted else False,
            newlines_in_values=layout.quoted,
            invalid_row_handler=note,
        ),
        pacsv.ConvertOptions(
            include_columns=wanted, column_types=dict.fromkeys(wanted, pa.binary()), strings_can_be_null=False
        ),
    )


def _check_quotes(lines: Lines, layout: Layout, file: Path) -> None:
    """Raise UserError where a quoted field is not closed, or goes on after its closing quote.

    Either way it is unclear where the fields end: two quotes that are never closed would hide the records between
    them.
    """
    if (
        lines.plain
        or not layout.quoted
        or b'"' not in lines.data
        or _simply_quoted(lines.data, layout.delimiter.encode())
    ):
        return
    ends = re.compile(_quoted_text(layout) + rb'("(?=[\n\r]|' + re.escape(layout.delimiter).encode() + rb"|\Z)|)")
    if all(ends.findall(lines.data)):
        return
    match = next(match for match in ends.finditer(lines.data) if not match.group(1))
    line = lines.first + lines.data.count(b"\n", 0, match.start())
    if match.end() == len(lines.data):
        raise UserError(f"{file}, line {line}: a quote is opened here and never closed; {_UNQUOTED}")
    raise UserError(
        f"{file}, line {line}: the quoted field that starts here goes on after its closing quote; close it before the "
        f'delimiter and write a quote inside of it as "", or {_UNQUOTED}'
    )


def _simply_quoted(data: bytes, delimiter: bytes) -> bool:
    """Whether every quote opens or closes a field, in turn: a quick check that most text passes."""
    text = np.frombuffer(b"\n" + data + b"\n", np.uint8)
    quotes = np.flatnonzero(text == ord('"'))
    if len(quotes) % 2:
        return False
    ends_field = np.zeros(256, bool)
    ends_field[list(b"\r\n" + delimiter)] = True
    around = ends_field[text[quotes[::2] - 1]].all() and ends_field[text[quotes[1::2] + 1]].all()
    return len(delimiter) == 1 and bool(around)


def _original(row: int, skipped: list[int]) -> int:
    """Return the record number of row `row` of the parsed table, given the records that were skipped (ascending)."""
    for record in skipped:
        if record <= row:
            row += 1
    return row


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def sniff_delimiter(file: Path, options: ReadOptions, usual: str) -> str:
    """Return the delimiter: named by the user, else the one of , tab ; | that the first line has most of."""
    if options.delimiter is not None:
        delimiter = options.delimiter.replace("\\t", "\t")
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"\0':
            raise UserError(
                f"--delimiter must be one ASCII character other than a quote or a line end, got {options.delimiter!r}"
            )
        return delimiter
    lines = next(read_lines(file, Layout(usual, quoted=False, encoding=check_encoding(options.encoding))))
    text = lines.data[:_LONGEST_NAME].decode("utf-8", "replace")
    if options.quote != "none":
        text = re.sub('"[^"]*"', "", text)
    first = text.split("\n", 1)[0]
    best = max((usual, ",", "\t", ";", "|"), key=first.count)
    return best if first.count(best) else usual


def read_names(file: Path, layout: Layout) -> Sequence[str]:
    """Return the names of a file's columns from its first line; raises UserError where two are the same."""
    names, _ = header(next(read_lines(file, layout)), layout, file)
    refuse_doubled(names, f"{file}, line 1" if layout.names is None else "--column-names")
    return names


def open_csv(paths: Sequence[Path], options: ReadOptions, usual: str = ",") -> DelimitedReader:
    """Open delimited files whose columns are named by their first line or by the user."""
    files = find_files(paths, (".csv", ".tsv", ".txt"), "delimited files")
    if options.quote not in (None, *QUOTES):
        raise UserError(f"--quote must be {' or '.join(QUOTES)}, got {options.quote!r}")
    if options.decimal not in (None, *DECIMALS):
        raise UserError(f"--decimal must be {' or '.join(DECIMALS)}, got {options.decimal!r}")
    delimiter = sniff_delimiter(files[0], options, usual)
    encoding = check_encoding(options.encoding)
    layout = Layout(delimiter, options.column_names or None, options.quote != "none", encoding)
    columns = choose_columns(read_names(files[0], layout), options, str(files[0]))
    return DelimitedReader(files, layout, columns, options)


register_built_in(Source("csv", "text with a header line, separated by , ; | or tabs", open_csv, OF_TEXT_FILES))
register_built_in(Source("tsv", "tab-separated text with a header", partial(open_csv, usual="\t"), OF_TEXT_FILES))
