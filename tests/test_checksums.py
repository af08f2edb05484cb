"""One flipped bit anywhere is found: in a file by its list of checksums, in a sealed JSON file by its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from turbogr import checksums
from turbogr.checksums import Damaged, FileChecksum, is_sealed, sealed, unsealed


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_flipped_bit_of_a_sealed_file_is_found() -> None:
    record = {"step": 12, "name": "prépare", "rows": [1, 2], "nested": {"crc32": "no"}}
    data = sealed(record).encode()
    assert unsealed(data, "x.json") == record == {k: v for k, v in json.loads(data).items() if k != "crc32"}
    assert is_sealed(data)
    for bit in range(8 * len(data)):
        with pytest.raises(Damaged, match=r"^x\.json is damaged"):
            unsealed(flipped(data, bit), "x.json")


@pytest.mark.parametrize("cut", [0, 1, 10, 38])
def test_a_sealed_file_that_was_cut_short_is_found(cut: int) -> None:
    with pytest.raises(Damaged):
        unsealed(sealed({"step": 1})[:cut].encode(), "x.json")


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_every_flipped_bit_of_a_file_is_found(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 64)
    path = tmp_path / "file"
    data = os.urandom(size)
    path.write_bytes(data)
    whole = FileChecksum.from_record(json.loads(json.dumps(FileChecksum.of(path).to_record())))
    pieces = FileChecksum()
    for start in range(0, size, 37):  # pieces that end anywhere within a block
        pieces.update(memoryview(data)[start : start + 37])
    assert pieces.to_record() == whole.to_record()
    assert whole.damage(path) is None
    for bit in range(0, 8 * size, 5):
        path.write_bytes(flipped(data, bit))
        first = bit // 8 // 64 * 64
        assert f"differs in bytes {first} to {min(first + 64, size) - 1}" in (whole.damage(path) or "")
    path.write_bytes(data + b"x")
    assert whole.damage(path) == f"has {size + 1} bytes, not {size} as written"
    path.unlink()
    assert whole.damage(path) == "is missing"
