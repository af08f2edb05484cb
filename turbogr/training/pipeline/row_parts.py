"""The rows of a batch, split by what the batch before or after it does with the same rows (for `exact_overlap`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.streams import upload
from turbogr.tables.embedding_tables import EmbeddingTables
from turbogr.tables.table import RowFlags, RowGradients, RowRequest, Table, UsedRows
from turbogr.tables.working_set import BatchRequest

UNSHARED, FOR_LOSS, FOR_INPUTS, EARLY_FOR_LOSS = range(4)
"""Kinds of rows, see `RowParts`; FOR_LOSS and FOR_INPUTS are the numbers of `UsedRows.uses`."""


class RowPart(NamedTuple):
    """Some rows of a request: their places [n] in its `ids`, and a request for them alone."""

    places: Tensor
    request: RowRequest

    def send_gradients(self, table: Table, grad: Tensor) -> object:
        """Start to send the gradients of this part to the owners; `grad` [R, d] is that of all rows of the request."""
        return table.send_gradients(self.request, grad.index_select(0, self.places))

    def sum_gradients(self, table: Table, grad: Tensor) -> RowGradients:
        """Sum the gradients of this part over the ranks."""
        return table.sum_gradients(self.send_gradients(table, grad))


class RowParts(NamedTuple):
    """The rows of a request by what two consecutive batches do with them.

    `for_inputs`: both use them, the later one as inputs. `for_loss`: both use them, the later one in its loss alone,
    the earlier one as inputs. `early_for_loss`: both use them in their losses alone, so that the earlier batch's
    gradients are complete when its backward pass begins. `unshared`: only one of the batches uses them.
    """

    for_inputs: RowPart
    for_loss: RowPart
    early_for_loss: RowPart
    unshared: RowPart


def used_rows(tables: EmbeddingTables, request: BatchRequest) -> list[UsedRows]:
    """Return the rows of this process that any rank's part of a batch uses, by group."""
    found = []
    for group, rows, num_inputs in zip(tables.groups, request.requests, request.num_inputs, strict=True):
        named = rows.at_hand
        inputs = torch.zeros(named.ids.shape, dtype=torch.bool)
        inputs[named.index[:num_inputs]] = True
        found.append(group.table.used_rows(rows, inputs))
    return found


def shared_kinds(uses: Tensor, uses_before: Tensor) -> Tensor:
    """Return the kind of every row [n] from how the later batch uses it and, 0 for not at all, the earlier one."""
    kinds = uses * (uses_before > 0)
    kinds[(kinds == FOR_LOSS) & (uses_before == 1)] = EARLY_FOR_LOSS
    return kinds


def split_request(tables: EmbeddingTables, request: BatchRequest, kinds: Sequence[RowFlags]) -> list[RowParts]:
    """Split a request by `kinds`, which the owners of the rows know, by group."""
    return [
        _split(group.table, rows, flags)
        for group, rows, flags in zip(tables.groups, request.requests, kinds, strict=True)
    ]


def _split(table: Table, request: RowRequest, kinds: RowFlags) -> RowParts:
    owned = kinds.of(request.at_hand.slots)
    requested = table.flags_for_requesters(request, owned)
    return RowParts(
        *(
            RowPart(
                upload((requested == kind).nonzero().flatten(), table.weight.device),
                table.subset(request, requested == kind, owned == kind),
            )
            for kind in (FOR_INPUTS, FOR_LOSS, EARLY_FOR_LOSS, UNSHARED)
        )
    )
