"""FuXi's attention: every form of it, the kernel against the definition."""

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
from turbogr.ops import DecayBias, RelativeBias, fuxi_attention, native

CASES = {
    "no sequences": ([], 2, 4, 4),
    "only empty sequences": ([0, 0], 2, 4, 4),
    "one token": ([1], 1, 1, 1),
    "around a block": ([0, 95, 96, 97, 1, 17], 2, 16, 8),
    "two hundred": ([200, 17, 63], 1, 50, 50),
    "several key ranges": ([1300, 20], 1, 8, 24),
}
DECAY = torch.tensor([0.7, 0.6, 0.8], dtype=torch.float64)


def attend(inputs: AttentionInputs, functional: bool) -> Callable[..., Tensor]:
    kind = DecayBias if functional else RelativeBias

    def function(v: Tensor, position_weight: Tensor, time_weight: Tensor, *qk: Tensor) -> Tensor:
        bias = kind(inputs.query_times, inputs.key_times, position_weight, time_weight)
        q, k = qk or (None, None)
        return fuxi_attention(q, k, v, inputs.offsets, bias, max_len=inputs.max_len)

    return function


def leaves(inputs: AttentionInputs, functional: bool, content: bool) -> list[Tensor]:
    time_weight = DECAY if functional else inputs.time_weight
    qk = [inputs.q, inputs.k] if content else []
    return [inputs.v, inputs.position_weight, time_weight, *qk]


def gradient(inputs: AttentionInputs, content: bool) -> Tensor:
    num_tokens, heads, e = inputs.v.shape
    random = torch.Generator().manual_seed(3)
    return torch.randn(num_tokens, heads, (3 if content else 2) * e, dtype=torch.float64, generator=random)


NAMES = ("v", "position_weight", "time_weight", "q", "k")


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("functional", [True, False], ids=["decay", "buckets"])
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
def test_forward_and_gradients(case: tuple[list[int], int, int, int], functional: bool, content: bool) -> None:
    inputs = make_inputs(*case)
    variables = leaves(inputs, functional, content)
    names = NAMES[: len(variables)]
    assert_close_as_plain(attend(inputs, functional), variables, gradient(inputs, content), names)


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("functional", [True, False], ids=["decay", "buckets"])
def test_every_instruction_set(isa: str, functional: bool) -> None:
    inputs = make_inputs([0, 1, 97, 130], 2, 20, 12)
    with instruction_set(isa):
        assert_close_as_plain(
            attend(inputs, functional), leaves(inputs, functional, True), gradient(inputs, True), NAMES
        )


@needs_kernels
@pytest.mark.parametrize("functional", [True, False], ids=["decay", "buckets"])
def test_the_number_of_threads_changes_no_bit(functional: bool) -> None:
    inputs = make_inputs([900, 5, 40], 2, 8, 8)
    arguments = attend(inputs, functional), leaves(inputs, functional, True), gradient(inputs, True)
    assert_independent_of_threads(lambda: with_gradients(*arguments, "auto", torch.float32))


@needs_kernels
@pytest.mark.parametrize("span", [1, 2**33], ids=["all at once", "beyond 32 bits"])
def test_any_times_decay(span: int) -> None:
    inputs = make_inputs([110], 1, 4, 4, span=span)
    assert_close_as_plain(attend(inputs, True), leaves(inputs, True, True), gradient(inputs, True), NAMES)


@needs_kernels
@pytest.mark.parametrize("functional", [True, False], ids=["decay", "buckets"])
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
def test_the_operator_obeys_the_rules_of_torch_library(functional: bool, content: bool) -> None:
    inputs = make_inputs([3, 0, 20], 2, 4, 6)
    v, position_weight, time_weight, *qk = (
        x.detach().float().requires_grad_() for x in leaves(inputs, functional, content)
    )
    q, k = qk or (None, None)
    times = inputs.query_times, inputs.key_times
    weights = position_weight, time_weight
    arguments = (q, k, v, inputs.offsets, None, None, *times, *weights, inputs.max_len, functional, 1.0)
    torch.library.opcheck(torch.ops.turbogr.fuxi_attention.default, arguments)
