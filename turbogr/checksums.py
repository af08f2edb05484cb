"""Checksums of files, and JSON files that carry their own: one flipped bit anywhere is found.

CRC-32 finds every damage within 32 neighbouring bits, and any other but one in 4 billion per block. Blocks of 16 MiB
are read by several threads at once, and the message says which block is damaged. zlib computes it at about the speed
of a fast disk; a cryptographic hash takes five to ten times as long and would protect from nobody who can also replace
the list of hashes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turbogr.errors import UserError

BLOCK = 16 << 20
_MOST_THREADS = 4
_PIECE = 1 << 20  # bytes that a thread holds at a time
_SEAL = re.compile(rb',\n  "crc32": "([0-9a-f]{8})"\n\}\n')
_SEAL_BYTES = len(b',\n  "crc32": "01234567"\n}\n')


class Damaged(UserError):
    """A file is not what was written, or is missing."""


@dataclass
class FileChecksum:
    """The size of a file and the CRC-32 of each of its blocks; it grows with `update`."""

    num_bytes: int = 0
    blocks: list[str] = field(default_factory=list)
    _open: int = 0  # CRC-32 of the last block, which is not full

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        while len(data):
            taken = data[: BLOCK - self.num_bytes % BLOCK]
            self._open = zlib.crc32(taken, self._open)
            if self.num_bytes % BLOCK == 0:
                self.blocks.append("")
            self.blocks[-1] = f"{self._open:08x}"
            self.num_bytes += len(taken)
            if self.num_bytes % BLOCK == 0:
                self._open = 0
            data = data[len(taken) :]

    def replace_first_block(self, block: bytes) -> None:
        """Change the first block, which has as many bytes as before."""
        assert len(block) == min(self.num_bytes, BLOCK)
        self.blocks[:1] = [f"{zlib.crc32(block):08x}"]

    def to_record(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "crc32": self.blocks}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> FileChecksum:
        """Read what `to_record` wrote; raises ValueError, KeyError or TypeError for anything else."""
        size, blocks = record["bytes"], record["crc32"]
        if not isinstance(size, int) or not isinstance(blocks, list) or len(blocks) != -(-size // BLOCK):
            raise ValueError("it has no list of checksums")
        return cls(size, [str(block) for block in blocks])

    @classmethod
    def of(cls, path: Path) -> FileChecksum:
        """Read a file and return its checksum."""
        size = path.stat().st_size
        return cls(size, _crcs(path, size))

    def damage(self, path: Path) -> str | None:
        """Return what is wrong with the file at `path`, as the end of a sentence that begins with its name, or None.

        Raises:
            OSError: it is there and cannot be read.
        """
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return "is missing"
        if size != self.num_bytes:
            return f"has {size:,} bytes, not {self.num_bytes:,} as written"
        for number, (found, expected) in enumerate(zip(_crcs(path, size), self.blocks, strict=True)):
            if found != expected:
                first, last = number * BLOCK, min((number + 1) * BLOCK, size) - 1
                return f"is not what was written: its checksum differs in bytes {first:,} to {last:,}"
        return None


def _crcs(path: Path, size: int) -> list[str]:
    """CRC-32 of each block of a file; zlib lets other threads run."""

    def crc(start: int) -> str:
        value, left = 0, min(BLOCK, size - start)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left and (piece := file.read(min(left, _PIECE))):
                value, left = zlib.crc32(piece, value), left - len(piece)
        return f"{value:08x}"

    starts = range(0, size, BLOCK)
    threads = min(_MOST_THREADS, os.cpu_count() or 1, len(starts))
    if threads < 2:
        return [crc(start) for start in starts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(crc, starts))


def sealed(record: Mapping[str, Any]) -> str:
    """Return a record, which is not empty, as JSON text whose last entry, "crc32", is the checksum of all before it."""
    text = json.dumps(record, indent=2)
    body = text[: text.rindex("\n}")]
    return f'{body},\n  "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'


def unsealed(data: bytes, name: str) -> dict[str, Any]:
    """Return the record of what `sealed` wrote, without its checksum; `name` is the file, for the message.

    Raises:
        Damaged: the text is not what was written.
    """
    body, seal = data[:-_SEAL_BYTES], _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is None or int(seal[1], 16) != zlib.crc32(body):
        raise Damaged(f"{name} is damaged: its checksum is not that of its content")
    record: dict[str, Any] = json.loads(data)
    del record["crc32"]
    return record


def is_sealed(data: bytes) -> bool:
    """Whether a JSON text has a checksum, right or wrong; files of earlier releases have none."""
    return b'"crc32"' in data[-2 * _SEAL_BYTES :]
