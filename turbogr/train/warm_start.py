"""Start from what another run has learned: its dense parameters, and the rows of the items that both know.

The new store extends the old one (`turbogr prepare --extend`): known items keep their rows, new items are appended and
keep the values they were drawn with. Optimiser state is not taken over; it belongs to the old data.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.layers.item_table import Table
from turbogr.models import RetrievalModel
from turbogr.train.checkpoint import load_for_inference


class WarmStart:
    """The best checkpoint of a run, checked against the store that is to be trained on.

    Raises:
        UserError: not a run, or its items are not the first rows of `store`.
    """

    def __init__(self, run: str | Path, store: Store) -> None:
        self.run = Path(run)
        self.model, self.table, self.config, self.info = load_for_inference(self.run)
        self._check_items(store, self.info["run"]["data"])

    def fill(self, config: Config) -> Config:
        """Take over every model size that `config` leaves open."""
        sizes = {
            field.name: getattr(self.config.model, field.name)
            for field in dataclasses.fields(config.model)
            if getattr(config.model, field.name) is None
        }
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))

    def apply(self, model: RetrievalModel, table: Table) -> None:
        """Copy the parameters and the known rows.

        Raises:
            UserError: the models differ in a parameter's shape.
        """
        ours, theirs = dict(model.named_parameters()), dict(self.model.named_parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in theirs.items()} or (table.dim != self.table.dim):
            raise UserError(
                f"the model differs from that of {self.run}; leave its sizes out of the recipe to take them over, or "
                "set the same as in its config.yaml"
            )
        with torch.no_grad():
            for name, parameter in ours.items():
                parameter.copy_(theirs[name])
            table.assign_first(self.table.weight)

    def _check_items(self, store: Store, data: dict[str, Any]) -> None:
        num_known = int(data["num_items"])
        if num_known > store.num_items or store.item_ids.fingerprint(num_known) != data["items_fingerprint"]:
            raise UserError(
                f"{store.path} does not extend the data of {self.run}, so its items have other rows; prepare it with "
                f"--extend {data['path']}"
            )
