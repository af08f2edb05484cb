"""A delta: what changed between two exports. `apply_delta.py` makes the new one of the old one and the delta, bit for
bit; a copy of it is in the folder.

Tensors are compared row by row, and changed and new rows are kept; ids are kept from the first new one on. All other
files that changed are kept whole: the dense weights are small, and an index changes everywhere.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.errors import UserError
from turbogr.exports import apply_delta
from turbogr.exports.folder_writer import FACTS, check_replaceable, replaced_folder
from turbogr.exports.standalone import ExportError, read_facts
from turbogr.parallel.safetensors_file import write_tensors

_MOST_CHANGED = 0.6  # as a share of a tensor's bytes; beyond it the tensor is kept whole
_ROWS_AT_ONCE = 1 << 20


def write_delta(old: Path, new: Path, out: Path) -> dict[str, Any]:
    """Write what changed from the export `old` to the export `new` into the folder `out`; return its delta.json.

    Raises:
        UserError: one is not an export, or `out` is something else than a delta.
    """
    check_replaceable(out, apply_delta.DELTA)
    base, made = _facts(old), _facts(new)
    with replaced_folder(out) as folder:
        changes: dict[str, Tensor] = {}
        files: dict[str, Any] = {}
        for name in sorted([*made["files"], FACTS]):
            how = _compare(old / name, new / name, folder, changes)
            files[name] = {**how, "sha256": apply_delta.file_hash(new / name)}
        write_tensors(folder / apply_delta.CHANGES, changes)
        facts = {"base": base["version"], "version": made["version"], "files": files}
        (folder / apply_delta.DELTA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(str(apply_delta.__file__), folder / "apply.py")
    return facts


def apply_to(old: Path, delta: Path, out: Path) -> dict[str, Any]:
    """Make the full export of an old one and a delta at `out`, which is replaced as a whole; return its model.json.

    Raises:
        UserError: the delta was made for another export, or a file is damaged.
    """
    check_replaceable(out)
    _facts(old)
    try:
        with replaced_folder(out) as folder:
            apply_delta.apply(old, delta, folder)
    except apply_delta.DeltaError as error:
        raise UserError(str(error)) from None
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{delta} or {old} is damaged: {error}; write a full export") from None
    return _facts(out)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = read_facts(folder)
    except ExportError as error:
        raise UserError(str(error)) from None
    return facts


def _compare(old: Path, new: Path, folder: Path, changes: dict[str, Tensor]) -> dict[str, Any]:
    """Add what changed in one file to the delta, and return how it is kept."""
    if old.is_file() and apply_delta.file_hash(old) == apply_delta.file_hash(new):
        return {"how": "same"}
    if old.is_file() and new.suffix == ".safetensors":
        return _compare_tensors(old, new, changes)
    if old.is_file() and new.suffix == ".parquet" and _keep_appended(old, new, folder):
        return {"how": "append"}
    shutil.copyfile(new, folder / f"{apply_delta.WHOLE}{new.name}")
    return {"how": "whole"}


def _compare_tensors(old: Path, new: Path, changes: dict[str, Tensor]) -> dict[str, Any]:
    header, after = apply_delta.read_tensors(new)
    _, before = apply_delta.read_tensors(old)
    for name, values in after.items():
        rows = _changed_rows(before.get(name), values)
        key = f"{new.name}:{name}"
        if rows is None or 8 * len(rows) + values[rows].nbytes > _MOST_CHANGED * values.nbytes:
            changes[f"{key}:whole"] = torch.from_numpy(np.array(values))
        else:
            changes[f"{key}:rows"] = torch.from_numpy(rows)
            changes[f"{key}:values"] = torch.from_numpy(np.array(values[rows]))
    return {"how": "rows", "header": header}


def _changed_rows(before: NDArray[Any] | None, after: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the rows that are new or differ in any bit; None where the tensors have other rows."""
    if before is None or before.dtype != after.dtype or before.shape[1:] != after.shape[1:] or after.ndim == 0:
        return None
    common = min(len(before), len(after))
    found = []
    for first in range(0, common, _ROWS_AT_ONCE):
        pieces = [np.array(part[first : min(first + _ROWS_AT_ONCE, common)]) for part in (before, after)]
        bits = [np.ascontiguousarray(piece).view(np.uint8).reshape(len(piece), -1) for piece in pieces]
        found.append(first + np.flatnonzero((bits[0] != bits[1]).any(axis=1)))
    return np.concatenate([*found, np.arange(common, len(after))]).astype(np.int64)


def _keep_appended(old: Path, new: Path, folder: Path) -> bool:
    """Keep the new rows of a table, and return True, if the old rows with these behind them give the same file."""
    before, after = pq.read_table(old), pq.read_table(new)
    if len(after) < len(before) or not after.slice(0, len(before)).equals(before):
        return False
    kept, trial = folder / f"{apply_delta.WHOLE}{new.name}", folder / ".trial"
    pq.write_table(after.slice(len(before)), kept, compression="zstd")
    apply_delta.append_table(old, kept, trial)
    same: bool = apply_delta.file_hash(trial) == apply_delta.file_hash(new)
    trial.unlink()
    return same
