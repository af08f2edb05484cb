"""Start from what another run has learned: its dense parameters, and the rows of the items that both know.

The new store extends the old one (`turbogr prepare --extend`): known items keep their rows, new items are appended and
keep the values they were drawn with. Optimiser state is not taken over; it belongs to the old data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.runs import load_model
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
        sizes = {
            field.name: getattr(self.config.model, field.name)
            for field in dataclasses.fields(config.model)
            if getattr(config.model, field.name) is None
        }
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))

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


def _listed(features: Sequence[str]) -> str:
    if not features:
        return "no features"
    return f"the feature{'s' * (len(features) > 1)} {', '.join(features)}"
