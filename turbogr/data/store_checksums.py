"""The checksums of a store's files: `checksums.json`, which has its own; and comparing a store with them.

Opening a store takes milliseconds and reads no column, so it compares nothing; `turbogr inspect --verify` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbogr.checksums import Damaged, FileChecksum, sealed, unsealed
from turbogr.data.store import CHECKSUMS, ITEM_INFO, Store
from turbogr.data.store_copy import check_content
from turbogr.errors import UserError
from turbogr.files import replace_text

NO_CHECKSUMS = "an earlier release wrote it, without checksums of whole files; the values of its columns were compared"


def write_checksums(folder: Path, checksums: Mapping[str, FileChecksum]) -> None:
    """Write the checksums of the files of a store by name."""
    record = {"format": 1, "files": {name: checksum.to_record() for name, checksum in checksums.items()}}
    replace_text(folder / CHECKSUMS, sealed(record))


def add_checksum(folder: Path, name: str, checksum: FileChecksum) -> None:
    """Add that of one more file, which is about to get its name; what it replaces stays right until then.

    In a store of an earlier release nothing is added.

    Raises:
        Damaged: the list of checksums is damaged.
    """
    if not (folder / CHECKSUMS).exists():
        return
    record = _read(folder)
    before = record["files"].get(name)
    record["files"][name] = checksum.to_record()
    record["replaced"] = {} if before is None else {name: before}
    replace_text(folder / CHECKSUMS, sealed(record))


def store_damages(path: Path) -> tuple[list[str], str | None]:
    """Return a sentence for each damaged file of a store, and a remark on how it was compared; all files are read.

    Raises:
        UserError: it is no store, or too damaged to be opened.
    """
    if not (path / CHECKSUMS).exists():
        store = Store.open(path)
        try:
            check_content(store)
        except UserError as error:
            return [str(error)], NO_CHECKSUMS
        return [], NO_CHECKSUMS
    try:
        record = _read(path)
        sentences = []
        for name, written in record["files"].items():
            damage = FileChecksum.from_record(written).damage(path / name)
            replaced = record.get("replaced", {}).get(name)
            if damage and replaced is not None:
                damage = FileChecksum.from_record(replaced).damage(path / name)
            if damage and not (name == ITEM_INFO and not (path / name).exists()):  # which may be removed
                sentences.append(f"{path / name} {damage}")
    except Damaged as error:
        return [str(error)], None
    except (KeyError, TypeError, ValueError, AttributeError):
        return [f"{path / CHECKSUMS} is no list of checksums"], None
    if not sentences:
        missing = {f"{name}.npy" for name in Store.open(path).manifest.columns} - record["files"].keys()
        sentences = [f"{path / name} has no checksum" for name in sorted(missing)]
    return sentences, None


def _read(folder: Path) -> dict[str, Any]:
    return unsealed((folder / CHECKSUMS).read_bytes(), str(folder / CHECKSUMS))
