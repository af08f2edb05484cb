"""Jagged: a batch of sequences of different lengths, stored end to end without padding.

Shapes: B rows, T = total number of values. Row b is values[offsets[b]:offsets[b + 1]].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """`values` [T, ...] and `offsets` [B + 1] (int64, from 0 to T, never decreasing), both on the same device.

    Raises:
        ValueError: offsets that are not one-dimensional int64, do not run from 0 to T, or decrease.
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        offsets = self.offsets
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(
                f"offsets must be a non-empty int64 vector, got {offsets.dtype} of shape {tuple(offsets.shape)}"
            )
        if offsets.device != self.values.device:
            raise ValueError(f"values are on {self.values.device} but offsets on {offsets.device}; move one of them")
        if offsets.device.type != "cpu":
            return  # reading a device tensor here would synchronise; batches are checked before they are moved
        if offsets[0] != 0 or offsets[-1] != self.values.shape[0]:
            raise ValueError(
                f"offsets must run from 0 to the {self.values.shape[0]} values, "
                f"got {int(offsets[0])} to {int(offsets[-1])}"
            )
        if bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError("offsets must not decrease")

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Jagged:
        """Build from `lengths` [B], which must add up to the number of values."""
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(lengths, dim=0, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Jagged:
        """Build from a non-empty list of tensors that differ only in their first dimension."""
        lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        return cls.from_lengths(torch.cat(list(rows)), lengths.to(rows[0].device))

    @property
    def num_rows(self) -> int:
        return self.offsets.numel() - 1

    @property
    def num_values(self) -> int:
        return self.values.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Length of every row, [B] int64."""
        return self.offsets.diff()

    @property
    def max_length(self) -> int:
        return int(self.lengths.max()) if self.num_rows else 0

    def positions(self) -> Tensor:
        """Position of every value within its row, [T] int64."""
        starts = torch.repeat_interleave(self.offsets[:-1], self.lengths, output_size=self.num_values)
        return torch.arange(self.num_values, device=self.offsets.device) - starts

    def row_index(self) -> Tensor:
        """Row of every value, [T] int64."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.num_values)

    def with_values(self, values: Tensor) -> Jagged:
        """Return a Jagged with the same offsets and other values."""

        return Jagged(values, self.offsets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Jagged:
        return Jagged(
            self.values.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking)
        )

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Tensor:
        if not -self.num_rows <= row < self.num_rows:
            raise IndexError(f"row {row} of a Jagged with {self.num_rows} rows")
        row %= self.num_rows
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(self.num_rows))
