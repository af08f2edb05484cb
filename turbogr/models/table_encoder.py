"""From histories to query vectors and from rows to item vectors, for evaluation and recommendation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.data.batching import Batch
from turbogr.models.retrieval_model import RetrievalModel
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.tables.working_set import on_device


class TableEncoder:
    """A model with its whole item table [num_items, dim]; the score of an item is a dot product of unit vectors.

    `features` has the whole table of every feature, `columns` the store's column behind it, by the feature's name.
    Tables may be in host memory beside a model on an accelerator.
    """

    def __init__(
        self,
        model: RetrievalModel,
        items: Tensor,
        *,
        features: Mapping[str, Tensor] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.items = model, items
        self.features, self.columns = dict(features or {}), dict(columns or {})

    @property
    def num_items(self) -> int:
        return self.items.shape[0]

    @torch.no_grad()
    def encode_last(self, batch: Batch) -> Tensor:
        """Return the unit vector of the last token of every sequence, [B, d]; sequences must not be empty.

        A feature that the batch does not carry is not given.
        """
        device = self.model.position.device
        rows, index = on_device(self.items, batch.items.values, device)
        features = {}
        for name, weight in self.features.items():
            values = batch.features.get(name)
            missing = torch.zeros_like(batch.items.values) if values is None else values
            assert isinstance(missing, Tensor), "a value per token"
            used, positions = on_device(weight, missing, device)
            features[name] = F.embedding(positions, used)
        batch = batch.to(device)
        return unit(self.model.encode(rows, index, batch, features=features)[batch.last_positions])

    @torch.no_grad()
    def item_rows(self, start: int, stop: int) -> Tensor:
        """Return the unit vectors of items start to stop - 1, [stop - start, d]."""
        return unit(self.items[start:stop].to(self.model.position.device))
