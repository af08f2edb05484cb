"""HSTU attention: the kernel against the definition, on the shapes where tiles begin and end."""

from __future__ import annotations

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
from turbogr.ops import RelativeBias, hstu_attention, native
from turbogr.ops.jagged_attention import reference

NAMES = ("q", "k", "v", "position_weight", "time_weight")

CASES = {
    "no sequences": ([], 2, 4, 4),
    "only empty sequences": ([0, 0, 0], 2, 4, 4),
    "one token": ([1], 1, 1, 1),
    "around one vector": ([7, 8, 9, 15, 16, 17], 2, 5, 3),
    "around a block": ([0, 95, 96, 97, 0, 1], 1, 16, 8),
    "around a small block": ([47, 48, 49], 1, 16, 8),
    "around 64": ([63, 64, 65], 3, 25, 25),
    "two hundred": ([200, 17, 163], 1, 50, 50),
    "1023": ([1023, 3], 2, 16, 32),
    "several key ranges": ([1300, 20], 2, 8, 24),
    "wide heads": ([130], 1, 128, 72),
}


def attend(inputs: AttentionInputs):  # type: ignore[no-untyped-def]
    def function(q: Tensor, k: Tensor, v: Tensor, position_weight: Tensor, time_weight: Tensor) -> Tensor:
        bias = RelativeBias(inputs.query_times, inputs.key_times, position_weight, time_weight)
        return hstu_attention(q, k, v, inputs.offsets, bias, max_len=inputs.max_len)

    return function


def leaves(inputs: AttentionInputs) -> list[Tensor]:
    return [inputs.q, inputs.k, inputs.v, inputs.position_weight, inputs.time_weight]


def run(inputs: AttentionInputs, backend: str = "auto", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return with_gradients(attend(inputs), leaves(inputs), inputs.grad, backend, dtype)


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_and_gradients(case: tuple[list[int], int, int, int]) -> None:
    inputs = make_inputs(*case)
    assert_close_as_plain(attend(inputs), leaves(inputs), inputs.grad, NAMES)


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set(isa: str) -> None:
    inputs = make_inputs([0, 1, 97, 230], 2, 20, 12)
    with instruction_set(isa):
        assert_close_as_plain(attend(inputs), leaves(inputs), inputs.grad, NAMES)


@needs_kernels
@pytest.mark.parametrize("lengths", [[1500], [5, 300, 40, 1, 900]], ids=str)
def test_the_number_of_threads_changes_no_bit(lengths: list[int]) -> None:
    inputs = make_inputs(lengths, 2, 8, 8)
    assert_independent_of_threads(lambda: run(inputs))


@needs_kernels
@pytest.mark.parametrize(
    "times",
    [
        pytest.param(lambda n: torch.zeros(n, dtype=torch.int64), id="all equal"),
        pytest.param(lambda n: torch.arange(n).flip(0) * 1000, id="falling"),
        pytest.param(lambda n: torch.randint(-(2**40), 2**40, (n,)), id="beyond 32 bits, unsorted"),
        pytest.param(lambda n: torch.randint(0, 2**31, (n,)).sort()[0], id="all of 31 bits"),
        pytest.param(lambda n: torch.tensor([0, 2**63 - 1]).repeat(n)[:n], id="the longest distance"),
        pytest.param(lambda n: torch.tensor([-(2**63), 2**62]).repeat(n)[:n], id="a distance that overflows"),
    ],
)
def test_any_times(times) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    inputs = make_inputs([150, 30], 2, 8, 8)
    drawn = times(180)
    inputs = inputs._replace(key_times=drawn, query_times=drawn.roll(-1))
    assert_close_as_plain(attend(inputs), leaves(inputs), inputs.grad, NAMES)


@needs_kernels
@pytest.mark.parametrize("num_weights", [1, 2, 33, 200, 2**16])
def test_buckets_are_exact_at_every_boundary(num_weights: int) -> None:
    boundaries = reference.bucket_boundaries(160)
    near = torch.cat([boundaries + shift for shift in (-1, 0, 1)]).clamp(min=0)
    near = near[near < 2**62].unique()
    n = near.numel() + 1
    # Token 0 has time 0 and predicts at time 0; token i predicts at the i-th distance and sees token 0 that far away.
    inputs = make_inputs([n], 1, 1, 1)._replace(
        key_times=torch.zeros(n, dtype=torch.int64), query_times=torch.cat([torch.zeros(1, dtype=torch.int64), near])
    )
    inputs = inputs._replace(q=inputs.q * 0, position_weight=inputs.position_weight * 0)
    inputs = inputs._replace(time_weight=torch.arange(num_weights, dtype=torch.float64) + 1)
    assert_close_as_plain(attend(inputs), leaves(inputs), inputs.grad, NAMES)


@needs_kernels
def test_views_of_a_packed_matrix_are_read_in_place() -> None:
    inputs = make_inputs([70, 130], 2, 12, 20)
    packed = torch.cat([x.flatten(1).float() for x in (inputs.q, inputs.k, inputs.v)], dim=1)
    q, k, v = packed.split([24, 24, 40], dim=1)
    views = [q.view(200, 2, 12), k.view(200, 2, 12), v.view(200, 2, 20)]
    weights = [inputs.position_weight.float(), inputs.time_weight.float()]
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    copies = [x.contiguous() for x in views]
    assert all(not x.is_contiguous() for x in (*views, *other))
    expected = attend(inputs)(*copies, *weights)
    assert torch.equal(attend(inputs)(*views, *weights), expected)
    assert torch.equal(attend(inputs)(*other, *weights), expected)


@needs_kernels
def test_a_longest_allowed_sequence_uses_the_ends_of_the_position_table() -> None:
    inputs = make_inputs([130], 1, 4, 4, max_len=130)
    assert_close_as_plain(attend(inputs), leaves(inputs), inputs.grad, NAMES)


@needs_kernels
def test_a_nan_reaches_the_tokens_that_see_it_and_no_others() -> None:
    inputs = make_inputs([120, 50], 1, 8, 8)
    inputs.k[100] = float("nan")
    out = run(inputs)[0]
    seen = torch.zeros(170, dtype=torch.bool)
    seen[100:120] = True
    assert torch.equal(out.isnan().flatten(1).any(1), seen)


def test_the_definition_has_the_gradient_it_claims() -> None:
    inputs = make_inputs([3, 0, 4], 2, 2, 3)
    variables = [x.detach().clone().requires_grad_() for x in leaves(inputs)]
    assert torch.autograd.gradcheck(attend(inputs), variables)


@needs_kernels
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    inputs = make_inputs([3, 0, 20], 2, 4, 6)
    q, k, v, position_weight, time_weight = (x.detach().float().requires_grad_() for x in leaves(inputs))
    times = inputs.query_times, inputs.key_times
    arguments = (q, k, v, inputs.offsets, None, None, *times, position_weight, time_weight, 23, "table", 1.0)
    torch.library.opcheck(torch.ops.turbogr.hstu_attention.default, arguments)


@needs_kernels
def test_torch_compile_sees_through_it() -> None:
    inputs = make_inputs([20, 9], 2, 4, 6)
    function = torch.compile(attend(inputs), backend="aot_eager", fullgraph=True)
    variables = [x.detach().float().requires_grad_() for x in leaves(inputs)]
    torch.testing.assert_close(function(*variables), attend(inputs)(*variables))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 3])}, "offsets must run from 0 to the 5 values"),
        ({"offsets": torch.tensor([0, 4, 3, 5])}, "offsets must not decrease"),
        ({"offsets": torch.tensor([0, 5], dtype=torch.int32)}, "offsets must be a non-empty int64 vector"),
        ({"k": torch.zeros(5, 2, 4)}, "k must have shape"),
        ({"v": torch.zeros(4, 2, 3)}, "v must have shape"),
        ({"key_times": torch.zeros(5)}, "key_times must be int64"),
        ({"position_weight": torch.zeros(10)}, "position_weight must have shape"),
        ({"time_weight": torch.zeros(0, dtype=torch.float64)}, "time_weight needs"),
        ({"time_weight": torch.zeros(3)}, "time_weight must be torch.float64 like"),
        ({"position_weight": torch.zeros(1)}, "position_weight must have shape"),
        ({"max_len": 4}, "longer than max_len 4"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    inputs = make_inputs([5], 2, 3, 3)._replace(**change)
    if "max_len" in change:
        inputs = inputs._replace(position_weight=torch.zeros(7))
    bias = RelativeBias(inputs.query_times, inputs.key_times, inputs.position_weight, inputs.time_weight)
    with pytest.raises(ValueError, match=message):
        hstu_attention(inputs.q, inputs.k, inputs.v, inputs.offsets, bias, max_len=inputs.max_len)
