"""The parameters of a run and its tables as safetensors, for people who want the weights, and reading them back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from turbogr import __version__
from turbogr.errors import UserError
from turbogr.exports.folder_writer import check_replaceable, replaced_folder
from turbogr.models.golden import ITEMS_NAME, public_name
from turbogr.parallel.safetensors_file import read_header, read_rows, write_tensors
from turbogr.plugins import load_plugins
from turbogr.runs import Which, load_model
from turbogr.tables.embedding_tables import ITEM

MARKER = "weights.json"
_MODEL, _TABLES = "model.safetensors", "tables.safetensors"


def export_weights(
    run: str | Path, out: str | Path, *, which: Which = "best", plugins: Sequence[str | Path] = ()
) -> Path:
    """Write the dense parameters, the tables and the config of a run of any task into the folder `out`.

    Raises:
        UserError: not a run, no checkpoint, a run of a simple method, or `out` is something else than such a folder.
    """
    target = Path(out)
    check_replaceable(target, MARKER)
    load_plugins(plugins)
    trained = load_model(run, which)
    parameters = dict(trained.task.model.named_parameters())
    if not parameters:
        raise UserError(
            f"{run} fits {trained.config.model.name}, which has no weights; export it without --format=weights"
        )
    facts = {
        "turbogr_version": __version__,
        "block": trained.config.model.name,
        "step": trained.checkpoint.step,
        "public_names": _public_names(trained.config.model.name, parameters),
    }
    with replaced_folder(target) as folder:
        write_tensors(folder / _MODEL, {name: value.detach().contiguous() for name, value in parameters.items()})
        write_tensors(folder / _TABLES, {name: table.contiguous() for name, table in trained.tables.items()})
        shutil.copyfile(Path(run) / "config.yaml", folder / "config.yaml")
        (folder / MARKER).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return target


def load_weights(folder: str | Path, names: Literal["turbogr", "public"] = "turbogr") -> dict[str, Tensor]:
    """Return the tensors of such a folder by name: dense parameters, and tables as `tables.NAME`.

    With "public", parameters have the names of the block's public implementation, in its layout (nn.Linear keeps its
    weight transposed), where it has one; the item table gets the row of zeros that stands for padding there.

    Raises:
        UserError: not such a folder.
    """
    folder = Path(folder)
    try:
        facts: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        parameters, tables = _read(folder / _MODEL), _read(folder / _TABLES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} has no weights ({error}); `turbogr export RUN --format=weights --out DIR` writes them"
        ) from None
    if names == "turbogr":
        return {**parameters, **{f"tables.{name}": table for name, table in tables.items()}}
    found = {}
    for name, value in parameters.items():
        public = facts["public_names"].get(name)
        found[name if public is None else public["name"]] = value.T if public and public["transposed"] else value
    for name, table in tables.items():
        if name == ITEM and facts["public_names"]:
            found[ITEMS_NAME] = torch.cat([table.new_zeros(1, table.shape[1]), table])
        else:
            found[f"tables.{name}"] = table
    return found


def _public_names(block: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the public name of every parameter that has one; nothing if the block has no public implementation."""
    from turbogr.plugins import find

    public = getattr(find("block", block).factory, "public_names", None)
    if public is None:
        return {}
    found = {}
    for name in parameters:
        own = name.split(".", 2)[-1]
        if name == "position" or (name.startswith("blocks.") and own in public.names):
            theirs, transposed = public_name(block, name)
            found[name] = {"name": theirs, "transposed": transposed}
    return found


def _read(path: Path) -> dict[str, Tensor]:
    found = {}
    for name, stored in read_header(path).items():
        found[name] = torch.empty(stored.shape, dtype=stored.dtype)
        read_rows(path, stored, 0, found[name])
    return found
