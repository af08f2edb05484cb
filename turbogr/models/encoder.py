"""From histories to query vectors and from rows to item vectors, for evaluation and recommendation."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.data.batching import Batch
from turbogr.layers.item_table import ItemTable, on_device
from turbogr.models.retrieval import RetrievalModel
from turbogr.ops.sampled_softmax.reference import unit


class TableEncoder:
    """A model with its item table, which may be in host memory beside a model on an accelerator; the score of an item
    is the dot product of two unit vectors."""

    def __init__(self, model: RetrievalModel, table: ItemTable) -> None:
        self.model, self.table = model, table

    @property
    def num_items(self) -> int:
        return self.table.num_items

    @torch.no_grad()
    def encode_last(self, batch: Batch) -> Tensor:
        """Return the unit vector of the last token of every sequence, [B, d]; sequences must not be empty."""
        device = self.model.position.device
        rows, index = on_device(self.table.weight, batch.items.values, device)
        batch = batch.to(device)
        outputs = self.model.encode(rows, index, batch)
        return unit(outputs[batch.last_positions])

    @torch.no_grad()
    def item_rows(self, start: int, stop: int) -> Tensor:
        """Return the unit vectors of items start to stop - 1, [stop - start, d]."""
        return unit(self.table.weight[start:stop].to(self.model.position.device))
