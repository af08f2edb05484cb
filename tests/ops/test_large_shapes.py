"""Shapes at which 32-bit arithmetic breaks: long sequences, long tables, operands beyond 2^31 elements.

Memory that nothing has written to takes no room, so a table of 8.6 GB of which some rows are used fits anywhere that
lets a process reserve it. The one test that fills such an operand needs the memory for real and skips without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.judging import needs_kernels
from turbogr.ops import RelativeBias, embed, hstu_attention, row_adagrad_, row_adam_, softmax_attention, unique_rows
from turbogr.ops.jagged_attention.reference import bucket_weights

pytestmark = needs_kernels

BEYOND = 2**31


def reserve(*shape: int) -> Tensor:
    """A tensor whose pages come into being as they are written; skips where the system refuses the reservation."""
    try:
        return torch.empty(*shape)
    except RuntimeError as error:
        pytest.skip(f"the system does not reserve {4 * torch.Size(shape).numel() / 1e9:.1f} GB: {error}")


def available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0


def test_a_sequence_of_100_000() -> None:
    """Forward and backward; some rows and some keys against fp64 computed directly."""
    n, d = 100_000, 8
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, d, generator=random).requires_grad_() for _ in range(3))
    times = torch.randint(0, 10**8, (n,), generator=random).sort()[0]
    position, time_weight = 0.3 * torch.randn(2 * n - 1, generator=random), 0.3 * torch.randn(33, generator=random)
    bias = RelativeBias(times.roll(-1), times, position, time_weight)
    grad = torch.randn(n, 1, d, generator=random)
    out = hstu_attention(q, k, v, torch.tensor([0, n]), bias, max_len=n)
    grads = torch.autograd.grad(out, [q, k, v], grad)

    wide = [x.detach().double()[:, 0] for x in (q, k, v, grad)]

    def scores(rows: Tensor, keys: Tensor) -> Tensor:
        by_time = bucket_weights(bias.query_times[rows], times[keys], time_weight.double())
        by_place = position.double()[n - 1 + keys[None, :] - rows[:, None]]
        return wide[0][rows] @ wide[1][keys].T + by_time + by_place

    rows, keys = torch.tensor([0, 1, 95, 96, 31_337, 65_536, n - 1]), torch.arange(n)
    seen = keys[None, :] <= rows[:, None]
    s = scores(rows, keys)
    torch.testing.assert_close(out[rows, 0].double(), F.silu(s) * seen @ wide[2] / n, rtol=1e-4, atol=1e-6)
    slope = torch.sigmoid(s) * (1 + s * (1 - torch.sigmoid(s))) * seen / n
    grad_q = (slope * (wide[3][rows] @ wide[2].T)) @ wide[1]
    torch.testing.assert_close(grads[0][rows, 0].double(), grad_q, rtol=1e-4, atol=1e-6)

    rows, keys = torch.arange(n - 3000, n), torch.tensor([n - 3000, n - 1500, n - 1])
    s = scores(rows, keys)
    seen = keys[None, :] <= rows[:, None]
    slope = torch.sigmoid(s) * (1 + s * (1 - torch.sigmoid(s))) * seen / n
    grad_k = (slope * (wide[3][rows] @ wide[2][keys].T)).T @ wide[0][rows]
    grad_v = (F.silu(s) * seen).T @ wide[3][rows] / n
    torch.testing.assert_close(grads[1][keys, 0].double(), grad_k, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grads[2][keys, 0].double(), grad_v, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(10_000_000, 16), (BEYOND // 64 + 1000, 64)], ids=["10 million rows", "2^31 elements"]
)
def test_a_long_table(shape: tuple[int, int]) -> None:
    """Look-up, its gradient and both row optimisers, on rows all over the table."""
    num_rows, width = shape
    table, mean, square = (reserve(*shape) for _ in range(3))
    random = torch.Generator().manual_seed(0)
    edges = torch.tensor([0, 1, num_rows // 2, num_rows - 2, num_rows - 1])
    ids = torch.cat([edges, torch.randint(0, num_rows, (500,), generator=random)]).repeat(2)
    distinct, index = unique_rows(ids, num_rows)
    assert torch.equal(distinct[index], ids) and torch.equal(distinct, ids.unique())

    start = torch.randn(distinct.numel(), width, generator=random)
    for tensor, value in ((table, start), (mean, torch.zeros_like(start)), (square, torch.zeros_like(start))):
        tensor.index_copy_(0, distinct, value)
    places = torch.zeros_like(ids)
    out = embed(table, ids, torch.zeros(1, width), places, scale=2.0)
    assert torch.equal(out, 2 * start[index])

    rows = start.clone().requires_grad_()
    embed(rows, index, torch.zeros(1, width), places, scale=2.0).sum().backward()
    grad = rows.grad
    assert grad is not None and torch.equal(
        grad, 2 * ids.unique(return_counts=True)[1][:, None].expand_as(grad).float()
    )

    row_adagrad_(table, square, distinct, grad, lr=0.1, eps=1e-8)
    torch.testing.assert_close(table[distinct], start - 0.1)
    torch.testing.assert_close(square[distinct], grad**2)
    square.index_fill_(0, distinct, 0.0)
    row_adam_(table, mean, square, distinct, grad, step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    torch.testing.assert_close(table[distinct], start - 0.2)
    torch.testing.assert_close(mean[distinct], 0.1 * grad)


@pytest.mark.parametrize("kind", ["hstu", "softmax"])
def test_attention_on_rows_that_lie_beyond_2_31_elements(kind: str) -> None:
    """q, k and v as views of a matrix so wide that its last tokens lie beyond 2^31 elements."""
    n, d, width = 34, 8, 2**26
    packed = reserve(n, width)
    columns = torch.randn(n, 3 * d, generator=torch.Generator().manual_seed(0))
    packed[:, -3 * d :] = columns
    assert (n - 1) * packed.stride(0) > BEYOND
    far = [x.unsqueeze(1).requires_grad_() for x in packed[:, -3 * d :].split(d, dim=1)]
    near = [x.clone().unsqueeze(1).requires_grad_() for x in columns.split(d, dim=1)]
    times = torch.arange(n) * 1000
    bias = RelativeBias(times, times, torch.randn(2 * n - 1), torch.randn(33))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = torch.tensor([0, 5, n])
        if kind == "hstu":
            return hstu_attention(q, k, v, offsets, bias, max_len=n)
        return softmax_attention(q, k, v, offsets, scale=0.3)

    results = []
    for inputs in (far, near):
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_an_output_of_more_than_2_31_elements() -> None:
    width = 64
    num_tokens = BEYOND // width + 1000
    needed = 4 * num_tokens * width + 2 * 8 * num_tokens + 2**30
    if available_bytes() < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free memory, there are {available_bytes() / 1e9:.0f}")
    if os.environ.get("CI"):
        pytest.skip("writing 8.6 GB takes too long on shared machines")
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    index = (torch.arange(num_tokens, dtype=torch.int32) % 7).to(torch.int64)
    out = embed(rows, index, torch.zeros(1, width), torch.zeros(1, dtype=torch.int64).expand(num_tokens), scale=3.0)
    middle = BEYOND // width
    for at in (0, middle // 2, middle - 1, middle, middle + 1, num_tokens - 1):
        assert torch.equal(out[at], 3 * rows[at % 7])
