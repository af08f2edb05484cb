"""Makes the new export of an old one and this delta: python apply.py OLD NEW

OLD is the export that the delta was made from; NEW must not exist. Needs numpy and pyarrow. Every file of NEW is
compared with its hash, so NEW is the full export bit for bit, or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

DELTA = "delta.json"
WHOLE = "new."  # files that are in the delta as they are have this before their names
CHANGES = "changes.safetensors"
DTYPES = {"F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "u1", "F64": "<f8"}


class DeltaError(Exception):
    """The delta does not belong to the old export, or a file is damaged."""


def apply(old, delta, new):
    """Write the new export into the empty folder `new`."""
    old, delta, new = Path(old), Path(delta), Path(new)
    facts = read_delta(delta)
    version = json.loads((old / "model.json").read_text(encoding="utf-8"))["version"]
    if version != facts["base"]:
        raise DeltaError(
            f"{delta} was made for the version {facts['base'][:12]}, and {old} is {version[:12]}; "
            "apply it to the export that it was made from, or write a full export"
        )
    for name, file in facts["files"].items():
        target = new / name
        if file["how"] == "same":
            shutil.copyfile(old / name, target)
        elif file["how"] == "whole":
            shutil.copyfile(delta / f"{WHOLE}{name}", target)
        elif file["how"] == "append":
            append_table(old / name, delta / f"{WHOLE}{name}", target)
        else:
            change_rows(old / name, delta / CHANGES, target, file["header"])
        if file_hash(target) != file["sha256"]:
            raise DeltaError(
                f"{name} does not become what was exported; {old} or {delta} is damaged, or pyarrow differs"
            )


def read_delta(folder):
    """Return the content of delta.json."""
    try:
        return json.loads((Path(folder) / DELTA).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DeltaError(f"{folder} is not a delta: it has no {DELTA}") from None


def read_tensors(path):
    """Return the header's text of a .safetensors file, and its tensors as arrays in the file, by name."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size).decode()
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        if end == start:
            found[name] = np.zeros(entry["shape"], dtype)
        else:
            found[name] = np.memmap(path, dtype, "r", 8 + size + start, tuple(entry["shape"]))
    return text, found


def change_rows(old, changes, target, header):
    """Write the file with this header: the old tensors with their changed and new rows, or whole new ones."""
    _, before = read_tensors(old)
    _, changed = read_tensors(changes)
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    with open(target, "wb") as file:
        data = header.encode()
        file.write(len(data).to_bytes(8, "little") + data)
        for name, entry in entries.items():
            key = f"{target.name}:{name}"
            if f"{key}:whole" in changed:
                values = changed[f"{key}:whole"]
            else:
                values = np.zeros(entry["shape"], DTYPES[entry["dtype"]])
                kept = min(len(values), len(before[name]))
                values[:kept] = before[name][:kept]
                values[changed[f"{key}:rows"]] = changed[f"{key}:values"]
            file.write(np.ascontiguousarray(values).tobytes())


def append_table(old, rows, target):
    """Write a table with further rows behind those of the old file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [pq.read_table(old), pq.read_table(rows)]
    columns = {
        name: pa.concat_arrays([part.column(name).combine_chunks() for part in parts]) for name in parts[0].schema.names
    }
    pq.write_table(pa.table(columns), target, compression="zstd")


def file_hash(path):
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def main(arguments):
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    old, new = Path(arguments[0]), Path(arguments[1])
    if new.exists():
        print(f"{new} exists; name another folder", file=sys.stderr)
        return 2
    aside = new.with_name(f".{new.name}.partial-{os.getpid()}")
    aside.mkdir()
    try:
        apply(old, Path(__file__).resolve().parent, aside)
        os.rename(aside, new)
    except (DeltaError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"{new} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
