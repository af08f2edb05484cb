"""The inverse of a symmetric positive definite matrix, with the same digits on any number of threads.

A library's factorisation may round differently on another number of threads, and then the last digit of a metric would
depend on the machine. Here the matrix is swept block by block: every product has a fixed shape and runs on one thread,
and products run in parallel. For a matrix of n rows that takes n³ multiply-adds, as a Cholesky factorisation with its
inverse does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from turbogr.evaluation.job_pool import Step, run_jobs

BLOCK = 512

Stop = Callable[[], bool]


def invert_in_place(matrix: Tensor, should_stop: Stop | None = None) -> Tensor:
    """Replace a symmetric positive definite matrix [n, n] by its inverse and return it.

    Sweeping block k turns A into [[A_rest - C D C^T, C D], [D C^T, -D]] with D = A_kk^-1 and C = A_rest,k; after all
    blocks it is -A^-1. Only the lower triangle of blocks is computed.

    Raises:
        Interrupted: `should_stop` returned True; the matrix is then neither of the two.
    """
    blocks = _Blocks(matrix)
    numbers = range(blocks.num)
    for pivot in numbers:
        (inverse,) = run_jobs(lambda chosen, step: _inverse(blocks.at(chosen, chosen)), [pivot], num_workers=1)
        column = [blocks.at(i, pivot).clone() if i >= pivot else blocks.at(pivot, i).T.contiguous() for i in numbers]
        scale = functools.partial(_scale, column, inverse)
        scaled = list(run_jobs(scale, numbers, should_stop=should_stop))
        update = functools.partial(_update, blocks, pivot, column, scaled)
        # The lowest rows have the most blocks and come first, so that no thread is left with a long one at the end.
        for _ in run_jobs(update, reversed(numbers), should_stop=should_stop):
            pass
        for i in numbers:
            if i > pivot:
                blocks.at(i, pivot).copy_(scaled[i])
            elif i < pivot:
                blocks.at(pivot, i).copy_(scaled[i].T)
        blocks.at(pivot, pivot).copy_(-inverse)
    for row in numbers:
        for other in range(row):
            blocks.at(other, row).copy_(blocks.at(row, other).T)
    return matrix.neg_()


class _Blocks:
    """A matrix as blocks of BLOCK rows and columns; the last ones are smaller."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self.num = -(-matrix.shape[0] // BLOCK)

    def at(self, row: int, column: int) -> Tensor:
        return self._matrix[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]


def _inverse(block: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.inv(block.double())
    return ((inverse + inverse.T) / 2).to(block.dtype)


def _scale(column: Sequence[Tensor], inverse: Tensor, row: int, step: Step) -> Tensor:
    return column[row] @ inverse


def _update(
    blocks: _Blocks, pivot: int, column: Sequence[Tensor], scaled: Sequence[Tensor], row: int, step: Step
) -> None:
    """Subtract C D C^T from the blocks of one row up to the diagonal."""
    for other in range(row + 1):
        if pivot not in (row, other):
            step(0)
            blocks.at(row, other).addmm_(scaled[row], column[other].T, alpha=-1.0)
