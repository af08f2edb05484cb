"""Causal softmax attention: the kernel against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.attention_inputs import AttentionInputs, make_inputs
from tests.ops.judging import (
    assert_close_as_plain,
    assert_independent_of_threads,
    instruction_set,
    needs_kernels,
    with_gradients,
)
from turbogr.ops import native, softmax_attention

CASES = {
    "no sequences": ([], 2, 4, 4),
    "only empty sequences": ([0, 0], 2, 4, 4),
    "one token": ([1], 1, 1, 1),
    "around a block": ([0, 95, 96, 97, 1, 17], 2, 16, 8),
    "around 64": ([63, 64, 65], 3, 25, 25),
    "two hundred": ([200, 17], 1, 50, 50),
    "several key ranges": ([1300, 20], 2, 8, 24),
}
NAMES = ("q", "k", "v")


def attend(inputs: AttentionInputs, scale: float = 0.3) -> Callable[..., Tensor]:
    return lambda q, k, v: softmax_attention(q, k, v, inputs.offsets, scale=scale)


@needs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_and_gradients(case: tuple[list[int], int, int, int]) -> None:
    inputs = make_inputs(*case)
    assert_close_as_plain(attend(inputs), inputs[:3], inputs.grad, NAMES)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set(isa: str) -> None:
    inputs = make_inputs([0, 1, 97, 130], 2, 20, 12)
    with instruction_set(isa):
        assert_close_as_plain(attend(inputs), inputs[:3], inputs.grad, NAMES)


@needs_kernels
def test_large_scores_neither_overflow_nor_vanish() -> None:
    inputs = make_inputs([150], 1, 16, 8)
    out, *grads = with_gradients(attend(inputs, 40.0), inputs[:3], inputs.grad, "auto", torch.float32)
    exact, *_ = with_gradients(attend(inputs, 40.0), inputs[:3], inputs.grad, "reference", torch.float64)
    assert float((out - exact).abs().max()) < 1e-2
    assert all(bool(g.isfinite().all()) for g in grads)


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    inputs = make_inputs([900, 5, 40], 2, 8, 8)
    assert_independent_of_threads(
        lambda: with_gradients(attend(inputs), inputs[:3], inputs.grad, "auto", torch.float32)
    )


@needs_kernels
def test_a_nan_reaches_the_tokens_that_see_it_and_no_others() -> None:
    inputs = make_inputs([120, 50], 1, 8, 8)
    inputs.k[100] = float("nan")
    out = with_gradients(attend(inputs), inputs[:3], inputs.grad, "auto", torch.float32)[0]
    seen = torch.zeros(170, dtype=torch.bool)
    seen[100:120] = True
    assert torch.equal(out.isnan().flatten(1).any(1), seen)


@needs_kernels
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    inputs = make_inputs([3, 0, 20], 2, 4, 6)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs[:3])
    torch.library.opcheck(torch.ops.turbogr.softmax_attention.default, (q, k, v, inputs.offsets, None, None, 0.5))
