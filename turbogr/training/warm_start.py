"""Start from what another run has learned: its dense parameters, and the rows of the items that both know.

The new store extends the old one (`turbogr prepare --extend`): known items keep their rows, new items are appended and
keep the values they were drawn with. Optimiser state is not taken over; it belongs to the old data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turbogr.checkpoints import Checkpoints
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.parallel.consistency import hash_bits
from turbogr.runs import RunFolder, load_model
from turbogr.tables.embedding_tables import EmbeddingTables


class WarmStart:
    """The best checkpoint of a run, checked against the store that is to be trained on.

    Raises:
        UserError: not a run, or its items are not the first rows of `store`.
    """

    def __init__(self, run: str | Path, store: Store) -> None:
        self.run = Path(run)
        trained = load_model(self.run)
        self.task, self.tables, self.config = trained.task, trained.tables, trained.config
        self.step = trained.checkpoint.step
        if trained.config.method is not None:
            raise UserError(
                f"{self.run} is a run of {trained.config.method}, which has no parameters to start from; name a run of "
                "a network with --init-from, or leave it out"
            )
        self._check_items(store, trained.folder.data())

    def fill(self, config: Config) -> Config:
        """Take over every model size that `config` leaves open.

        Raises:
            UserError: the two runs do not have the same features.
        """
        self._check_features(config)
        return with_sizes_of(config, self.config)

    def apply(self, model: nn.Module, tables: EmbeddingTables) -> None:
        """Copy the parameters and the known rows of every table.

        Raises:
            UserError: the models or their tables differ in shape.
        """
        ours, theirs = dict(model.named_parameters()), dict(self.task.model.named_parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
        widths = {spec.name: spec.dim for spec in tables.specs}
        same = shapes == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
        if not same or widths != {name: weight.shape[1] for name, weight in self.tables.items()}:
            raise UserError(
                f"the model differs from that of {self.run}; leave its sizes out of the recipe to take them over, or "
                "set the same as in its config.yaml"
            )
        with torch.no_grad():
            for name, parameter in ours.items():
                parameter.copy_(theirs[name])
            for spec in tables.specs:
                tables.assign(spec.name, self.tables[spec.name][: spec.num_rows])

    @functools.cached_property
    def identity(self) -> dict[str, int]:
        """Return what tells these weights from all others: the step of the checkpoint and a hash."""
        named = {**dict(self.task.model.named_parameters()), **{f"table {n}": t for n, t in self.tables.items()}}
        return {"step": self.step, "weights": hash_bits(named[name] for name in sorted(named))}

    def _check_features(self, config: Config) -> None:
        ours, theirs = list(config.features), list(self.config.features)
        if set(ours) != set(theirs):
            remedy = "set `features` as in its config.yaml, or train without --init-from"
            raise UserError(
                f"{self.run} was trained with {_listed(theirs)}, and this recipe has {_listed(ours)}, so they have "
                f"different models; {remedy}"
            )

    def _check_items(self, store: Store, data: dict[str, Any]) -> None:
        num_known = int(data["num_items"])
        if num_known > store.num_items or store.item_ids.fingerprint(num_known) != data["items_fingerprint"]:
            raise UserError(
                f"{store.path} does not extend the data of {self.run}, so its items have other rows; prepare it with "
                f"--extend={data['path']}"
            )


def repeated_warm_start(run: Path, store: Store, init_from: str | Path | None) -> WarmStart | None:
    """Return what an existing run starts from again; None if it has a checkpoint, or never started from another run.

    Raises:
        UserError: `init_from` is not what the run was started from, or that is needed and is gone or has changed.
    """
    record = RunFolder.open(run).record if (run / "run.json").exists() else {}
    stored, given = record.get("init_from"), None if init_from is None else str(Path(init_from).resolve())
    if given not in (None, stored):
        how = "without --init-from" if stored is None else f"with --init-from={stored}"
        raise UserError(
            f"{run} was started {how}, not with --init-from={given}; leave it out to resume that run, or start a new "
            "one in another --out"
        )
    if stored is None or Checkpoints(run).steps():
        return None
    why = f"{run} has no checkpoint yet, so it must start from {stored} again"
    remedy = f"put {stored} back as it was, or start a new run in another --out"
    try:
        start = WarmStart(stored, store)
    except UserError as error:
        raise UserError(f"{why}, and that is not possible: {error}. To go on, {remedy}") from error
    if record.get("init_from_checkpoint") not in (None, start.identity):  # earlier releases do not say
        raise UserError(f"{why}, and the best checkpoint there is another one now; {remedy}")
    return start


def with_sizes_of(config: Config, other: Config) -> Config:
    """Take over every model size that `config` leaves open from `other`."""
    sizes = {
        field.name: getattr(other.model, field.name)
        for field in dataclasses.fields(config.model)
        if getattr(config.model, field.name) is None
    }
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))


def _listed(features: Sequence[str]) -> str:
    if not features:
        return "no features"
    return f"the feature{'s' * (len(features) > 1)} {', '.join(features)}"
