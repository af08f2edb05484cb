"""Attention's Triton kernels in the interpreter: forward and every gradient against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.attention_inputs import AttentionInputs, make_inputs
from tests.ops.judging import plain_pytorch, with_gradients
from tests.ops.masked_attention import MASKS, OPERATORS, make_mask
from turbogr.ops import registry
from turbogr.ops.jagged_attention.reference import bucket_boundaries, position_weights
from turbogr.ops.jagged_attention.triton_relative import NUM_BINS, add_diagonals, bins


def assert_close(operator: str, inputs: AttentionInputs, mask: str | None, dtype: torch.dtype = torch.float32) -> None:
    """At most twice the error of plain PyTorch of the same type, both against float64."""
    lengths = inputs.offsets.diff().tolist()
    kind = OPERATORS[operator]
    function = kind.bind(inputs, None if mask is None else make_mask(mask, lengths))
    # What rounding the inputs costs is not the kernels' doing.
    leaves, grad = [x.to(dtype).double() for x in kind.leaves(inputs)], kind.grad(inputs).to(dtype).double()
    exact = with_gradients(function, leaves, grad, "reference", torch.float64)
    with plain_pytorch():
        plain = with_gradients(function, leaves, grad, "reference", dtype)
    ours = with_gradients(function, leaves, grad, "triton", dtype)
    smallest = 1e-6 if dtype == torch.float32 else 4e-3  # half a unit in the last place of bf16
    for name, e, p, o in zip(("out", *kind.names), exact, plain, ours, strict=True):
        assert o.shape == e.shape, name
        if e.numel() == 0:
            continue
        # The gradient of a score that cancels to 0 is as exact as the numbers that cancel, which are about 1.
        floor = smallest * max(1.0, float(e.abs().max()))
        assert float((o - e).abs().max()) <= 2 * float((p - e).abs().max()) + floor, name


@pytest.mark.parametrize(
    ("operator", "lengths", "mask"),
    [
        ("hstu", [0, 1, 33], None),
        ("hstu", [31, 32], "random"),
        ("hstu without bias", [65], "window"),
        ("hstu without bias", [40], "candidates"),
        ("fuxi", [33], None),
        ("fuxi by decay", [34], "far back"),
        ("fuxi without content", [1, 33], "everything"),
        ("softmax", [0, 1, 33], None),
        ("softmax", [70], "the future alone"),
    ],
    ids=str,
)
def test_forward_and_gradients(operator: str, lengths: list[int], mask: str | None) -> None:
    assert_close(operator, make_inputs(lengths, 1, 5, 7), mask)


@pytest.mark.parametrize("operator", ["hstu", "fuxi by decay", "softmax"])
def test_bf16(operator: str) -> None:
    assert_close(operator, make_inputs([33], 1, 16, 16), "mixed rows", torch.bfloat16)


@pytest.mark.parametrize("operator", ["hstu", "softmax"])
def test_a_wide_head_is_multiplied_in_chunks(operator: str) -> None:
    assert_close(operator, make_inputs([1, 33], 1, 20, 35), "random")


def test_several_heads_read_views_in_place() -> None:
    inputs = make_inputs([5], 3, 4, 6)
    assert not inputs.q.is_contiguous()
    assert_close("hstu", inputs, None)
    assert_close("fuxi", inputs, None)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str) -> None:
    inputs = make_inputs([45], 1, 4, 4)
    function = OPERATORS["hstu without bias"].bind(inputs, make_mask(mask, [45]))
    leaves = [x.float() for x in (inputs.q, inputs.k, inputs.v)]
    results = []
    for backend in ("reference", "triton"):
        with registry.backend(backend):
            results.append(function(*leaves))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_tokens(operator: str, lengths: list[int]) -> None:
    assert_close(operator, make_inputs(lengths, 2, 4, 4), None)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(torch.zeros(40, dtype=torch.int64), id="all equal: every tile has one bucket"),
        pytest.param(torch.tensor([0, 2**63 - 1]).repeat(20), id="the longest distance"),
        pytest.param(torch.tensor([-(2**63), 2**62]).repeat(20), id="a distance that overflows"),
        pytest.param(torch.arange(40).flip(0) * 1000, id="falling"),
    ],
)
def test_odd_times(times: Tensor) -> None:
    inputs = make_inputs([40], 1, 4, 4)._replace(key_times=times, query_times=times.roll(3))
    function = OPERATORS["hstu"].bind(inputs, None)
    leaves = [x.float() for x in OPERATORS["hstu"].leaves(inputs)]
    results = []
    for backend in ("reference", "triton"):
        with registry.backend(backend):
            results.append(function(*leaves))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_buckets", [0, 1, 32, 128, 300])
def test_bins_put_every_distance_into_its_bucket(num_buckets: int) -> None:
    boundaries = bucket_boundaries(num_buckets)
    powers = 2 ** torch.arange(63)
    eighths = torch.cat([powers + powers // 8 * m for m in range(8)])
    near = torch.cat([boundaries, eighths, torch.tensor([0, 2**63 - 1])])
    distance = torch.cat([near + shift for shift in (-(2**38), -65, -1, 0, 1, 65, 2**38)])
    distance = distance[distance >= 0]
    table = bins(num_buckets, torch.device("cpu"))
    bin = ((distance.float().view(torch.int32) >> 20) - 1016).clamp(min=0).long()
    assert int(bin.max()) < NUM_BINS
    entry = 2 * bin + (distance >= table.boundaries[bin])
    assert torch.equal(table.buckets[entry].long(), torch.bucketize(distance, boundaries, right=True))


@pytest.mark.parametrize("max_len", [1, 3, 4, 9])
@pytest.mark.parametrize("ranges", [False, True])
def test_diagonals_of_tiles_add_up_to_those_of_the_sequence(max_len: int, ranges: bool) -> None:
    n, side = 4, -(-max_len // 4)
    pairs = torch.randn(side * n, side * n, dtype=torch.float64)
    pairs[max_len:] = 0
    pairs[:, max_len:] = 0
    if not ranges:
        pairs.tril_()
    tiles = pairs.view(side, n, side, n).transpose(1, 2)
    diagonals = range(-(side - 1) if ranges else 0, side)
    on = {k: [tiles[r, r - k] for r in range(side) if 0 <= r - k < side] for k in diagonals}
    sums = torch.stack([torch.stack(found).sum(0) for found in on.values()])
    weight = torch.zeros(2 * max_len - 1, dtype=torch.float64, requires_grad=True)
    weighed = position_weights(max_len, weight, max_len) * pairs[:max_len, :max_len]
    expected = torch.autograd.grad(weighed.sum(), weight)
    torch.testing.assert_close(add_diagonals(sums, max_len, ranges=ranges), expected[0])


def test_the_same_bits_twice() -> None:
    inputs = make_inputs([20, 13], 1, 4, 4)
    kind = OPERATORS["hstu"]
    runs = [
        with_gradients(kind.bind(inputs, None), kind.leaves(inputs), kind.grad(inputs), "triton", torch.float32)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_operators_obey_the_rules_of_torch_library() -> None:
    inputs = make_inputs([3], 1, 4, 4)
    q, k, v, position_weight, time_weight = (
        x.detach().float().requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v, inputs.position_weight, inputs.time_weight)
    )
    times = inputs.query_times, inputs.key_times
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    ops, length = torch.ops.turbogr, inputs.max_len
    arguments = (q, k, v, inputs.offsets, None, None, *times, position_weight, time_weight, length)
    torch.library.opcheck(ops.hstu_attention_triton.default, (*arguments, 1.0), test_utils=checks)
    torch.library.opcheck(ops.fuxi_attention_triton.default, (*arguments, False), test_utils=checks)
    torch.library.opcheck(ops.softmax_attention_triton.default, (*arguments[:6], 0.5), test_utils=checks)


def test_torch_compile_sees_through_it() -> None:
    inputs = make_inputs([4], 1, 4, 4)
    kind = OPERATORS["hstu without bias"]
    function = kind.bind(inputs, None)
    leaves = [x.detach().float().requires_grad_() for x in kind.leaves(inputs)]
    with registry.backend("triton"):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*leaves), function(*leaves))


def test_a_head_that_no_tile_has_room_for_is_refused() -> None:
    inputs = make_inputs([2], 1, 300, 4)
    function = OPERATORS["softmax"].bind(inputs, None)
    with registry.backend("triton"), pytest.raises(ValueError, match=r"size 300.*heads up to 256"):
        function(*(x.float() for x in OPERATORS["softmax"].leaves(inputs)))
