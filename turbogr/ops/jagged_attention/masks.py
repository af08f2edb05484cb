"""Attention masks as key ranges: which tokens of its own sequence a token sees.

A mask is two numbers a token, so it takes no memory to speak of, and kernels see at once which tiles to skip. One range
and the token itself describe causal attention, windows, prefixes that see each other, candidates that see the history
but not each other, and full attention.

Shape legend: T tokens, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops.checks import check_shape, is_readable


class KeyRanges(NamedTuple):
    """Token i sees the keys j of its own sequence with `first[i] <= j < last[i]`, and always itself.

    Both are int64 [T]; i and j count from the start of the sequence. A range may lie before or after the token, and
    with `first >= last` the token sees itself alone.
    """

    first: Tensor
    last: Tensor


def check_ranges(visible: KeyRanges, offsets: Tensor, num_tokens: int) -> None:
    """Require ranges that fit the sequences: int64 [T], first at least 0, last at most the length of the sequence."""
    for name, ends in visible._asdict().items():
        check_shape(f"visible.{name}", ends, (num_tokens,))
        if ends.dtype != torch.int64:
            raise ValueError(f"visible.{name} must be int64, got {ends.dtype}")
    if num_tokens == 0 or not (is_readable(visible.first) and is_readable(visible.last) and is_readable(offsets)):
        return
    if visible.first.min() < 0:
        at = int(visible.first.argmin())
        raise ValueError(f"visible.first must not be negative, got {int(visible.first[at])} at token {at}")
    lengths = offsets.diff()
    room = lengths.repeat_interleave(lengths, output_size=num_tokens) - visible.last
    if room.min() < 0:
        at = int(room.argmin())
        raise ValueError(
            f"visible.last must be at most the length of the sequence, got {int(visible.last[at])} at token {at}, "
            f"whose sequence has {int(visible.last[at] + room[at])} tokens"
        )


def causal_ranges(offsets: Tensor) -> KeyRanges:
    """Every token sees the tokens before it and itself: what `visible=None` means."""
    position, _ = _positions(offsets)
    return KeyRanges(torch.zeros_like(position), position + 1)


def hstu_ranges(
    offsets: Tensor,
    *,
    num_targets: Tensor | None = None,
    num_contextual: int = 0,
    window: int = 0,
    full_tail: int = 0,
    causal: bool = True,
) -> KeyRanges:
    """The mask of HSTU's public code for ranking; README.md has the rule in words.

    A sequence is `num_contextual` contextual tokens, its history, then its targets (candidates).

    Args:
        offsets: [B + 1], where sequences begin; lengths count all tokens.
        num_targets: [B] int64, how many tokens at the end of each sequence are targets. None: there are none.
        num_contextual: Tokens at the start of each sequence that see each other and the whole history.
        window: How many tokens a token sees before itself; 0 means all.
        full_tail: With a window: rows of the last so many history tokens, and of all targets, have no window.
        causal: False lets tokens see as far ahead as back.

    Raises:
        ValueError: a negative number, or a sequence shorter than its contextual tokens and targets.
    """
    for name, value in (("num_contextual", num_contextual), ("window", window), ("full_tail", full_tail)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    _check_parts(offsets, num_targets, num_contextual)
    position, sequence = _positions(offsets)
    length = offsets.diff()[sequence]
    targets = torch.zeros_like(length) if num_targets is None else num_targets[sequence]
    # Tokens are numbered in the order in which they see each other: the contextual tokens 0, history tokens one by one
    # from there, all targets `after`. `shift` is the difference between the position and the number of a history token.
    shift = max(num_contextual - 1, 0)
    after = length - targets - shift
    number = torch.minimum((position - shift).clamp(min=0), after)

    def start(at_least: Tensor) -> Tensor:
        """Position of the first token with this number or a larger one."""
        found = torch.where(at_least > 0, at_least + shift, 0)
        return torch.where(at_least > after, length, torch.minimum(found, length))

    first = torch.zeros_like(position)
    last = start(number) if causal else torch.where(number == after, start(number), length)
    if window > 0:
        limited = number < after - full_tail if full_tail > 0 else torch.ones_like(number, dtype=torch.bool)
        first = torch.where(limited, start(number - window), first)
        if not causal:
            last = torch.where(limited, torch.minimum(last, start(number + window + 1)), last)
    if num_contextual > 0:
        is_contextual = number == 0
        first = torch.where(is_contextual, 0, first)
        last = torch.where(is_contextual, torch.maximum(last, start(after)), last)
    return KeyRanges(first, last)


def _positions(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Position of every token in its sequence, and the number of that sequence; [T] each."""
    lengths = offsets.diff()
    sequence = torch.arange(lengths.numel(), device=offsets.device).repeat_interleave(lengths)
    return torch.arange(sequence.numel(), device=offsets.device) - offsets[:-1][sequence], sequence


def _check_parts(offsets: Tensor, num_targets: Tensor | None, num_contextual: int) -> None:
    lengths = offsets.diff()
    if num_targets is not None:
        check_shape("num_targets", num_targets, (lengths.numel(),))
        if num_targets.dtype != torch.int64:
            raise ValueError(f"num_targets must be int64, got {num_targets.dtype}")
    if not is_readable(offsets) or (num_targets is not None and not is_readable(num_targets)):
        return
    targets = torch.zeros_like(lengths) if num_targets is None else num_targets
    needed = torch.where(lengths + targets > 0, num_contextual + targets, 0)
    wrong = ((targets < 0) | (lengths < needed)).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(
            f"sequence {at} has {int(lengths[at])} tokens, which cannot be {num_contextual} contextual tokens and "
            f"{int(targets[at])} targets"
        )
