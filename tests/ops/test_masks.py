"""Attention masks as key ranges: operators against a dense definition, and the ranges of HSTU's public mask rule."""

from __future__ import annotations

from typing import Any

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
from tests.ops.masked_attention import ALPHA, MASKS, OPERATORS, Operator, dense_attention, dense_mask, make_mask
from turbogr.ops import KeyRanges, causal_ranges, hstu_attention, hstu_ranges, native

LENGTHS = [0, 1, 63, 64, 65, 0, 300]
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())


def judge(operator: Operator, inputs: AttentionInputs, visible: KeyRanges) -> None:
    """Compare the kernel with the definition, forward and every gradient."""
    function, leaves, grad = operator.bind(inputs, visible), operator.leaves(inputs), operator.grad(inputs)
    if operator is not OPERATORS["softmax"]:
        assert_close_as_plain(function, leaves, grad, operator.names)
        return
    # The kernel takes the gradient of a score as a difference of two products. Of a token that sees itself alone it is
    # exactly 0 in plain PyTorch, but here as small as the products are precise.
    exact = with_gradients(function, leaves, grad, "reference", torch.float64)
    for ours, expected in zip(run(operator, inputs, visible, "cpu"), exact, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def run(operator: Operator, inputs: AttentionInputs, visible: KeyRanges | None, backend: str = "auto") -> list[Tensor]:
    leaves, grad = operator.leaves(inputs), operator.grad(inputs)
    return with_gradients(operator.bind(inputs, visible), leaves, grad, backend, torch.float32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_definition_is_the_dense_one(name: str, mask: str) -> None:
    lengths = [0, 1, 17, 70]
    inputs = make_inputs(lengths, 2, 5, 3)
    visible = make_mask(mask, lengths)
    operator = OPERATORS[name]
    leaves = [x.detach().clone().requires_grad_() for x in operator.leaves(inputs)]
    results = []
    for out in (operator.bind(inputs, visible)(*leaves), dense_attention(name, inputs, visible, *leaves)):
        results.append([out, *torch.autograd.grad(out, leaves, operator.grad(inputs))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@each_operator
@pytest.mark.parametrize("mask", ["random", "prefix that sees all"])
def test_the_definition_has_the_gradient_it_claims(operator: Operator, mask: str) -> None:
    lengths = [3, 0, 4]
    inputs = make_inputs(lengths, 2, 2, 3)
    variables = [x.detach().clone().requires_grad_() for x in operator.leaves(inputs)]
    assert torch.autograd.gradcheck(operator.bind(inputs, make_mask(mask, lengths)), variables)


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("mask", MASKS)
@each_operator
def test_forward_and_gradients(operator: Operator, mask: str) -> None:
    judge(operator, make_inputs(LENGTHS, 2, 12, 20), make_mask(mask, LENGTHS))


@needs_kernels
@pytest.mark.parametrize("mask", ["random", "window", "everything", "candidates"])
@each_operator
def test_a_sequence_in_several_key_ranges(operator: Operator, mask: str) -> None:
    lengths = [1200, 20]
    judge(operator, make_inputs(lengths, 2, 8, 8), make_mask(mask, lengths))


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@each_operator
def test_every_instruction_set(operator: Operator, isa: str) -> None:
    lengths = [0, 1, 97, 230]
    with instruction_set(isa):
        judge(operator, make_inputs(lengths, 2, 20, 12), make_mask("mixed rows", lengths))


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("with_itself", [True, False], ids=["j <= i", "j < i and itself"])
@each_operator
def test_a_causal_mask_gives_the_bits_of_no_mask(operator: Operator, with_itself: bool) -> None:
    inputs = make_inputs([900, 0, 5, 96, 41], 3, 8, 8)
    visible = causal_ranges(inputs.offsets)
    if not with_itself:
        visible = visible._replace(last=visible.last - 1)
    for masked, plain in zip(run(operator, inputs, visible), run(operator, inputs, None), strict=True):
        assert torch.equal(masked, plain)


@needs_kernels
@pytest.mark.parametrize("mask", ["random", "window"])
@each_operator
def test_the_number_of_threads_changes_no_bit(operator: Operator, mask: str) -> None:
    lengths = [900, 5, 40]
    inputs, visible = make_inputs(lengths, 2, 8, 8), make_mask(mask, lengths)
    assert_independent_of_threads(lambda: run(operator, inputs, visible))


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("times", ["falling", "beyond 32 bits"])
@pytest.mark.parametrize("name", ["hstu", "fuxi", "fuxi by decay"])
def test_any_times_ahead_and_behind(name: str, times: str) -> None:
    inputs = make_inputs([230], 1, 4, 4)
    drawn = torch.arange(230).flip(0) * 1000 if times == "falling" else torch.randint(-(2**40), 2**40, (230,))
    judge(OPERATORS[name], inputs._replace(key_times=drawn, query_times=drawn.roll(-1)), make_mask("everything", [230]))


@needs_kernels
def test_both_ends_of_the_position_table_are_used() -> None:
    inputs = make_inputs([130], 1, 4, 4, max_len=130)
    judge(OPERATORS["hstu"], inputs, make_mask("everything", [130]))


@needs_kernels
@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if "k" in operator.names])
def test_a_nan_reaches_the_tokens_that_see_it_and_no_others(name: str) -> None:
    inputs = make_inputs([250], 1, 8, 8)
    inputs.k[100] = float("nan")
    visible = make_mask("mixed rows", [250])
    out = run(OPERATORS[name], inputs, visible)[0]
    assert torch.equal(out.isnan().flatten(1).any(1), dense_mask(visible, 0, 250)[:, 100])


@needs_kernels
@pytest.mark.usefixtures("block_size")
@each_operator
def test_tiles_that_no_row_sees_are_skipped(operator: Operator) -> None:
    inputs = make_inputs([500], 1, 8, 8)
    inputs.v[200] = float("nan")  # a tile that is computed carries it into its rows, even times a weight of 0
    out, *grads = run(operator, inputs, make_mask("window", [500]))
    block, window = 96, 40
    far = [*range(200 - block), *range(200 + window + block, 500)]
    assert out[200].isnan().any()
    assert out[far].isfinite().all()
    for name, grad in zip(operator.names, grads, strict=True):
        if name in ("q", "k", "v"):
            assert grad[far].isfinite().all(), name


@needs_kernels
@pytest.mark.parametrize("name", ["hstu", "fuxi", "softmax"])
def test_large_scores_of_unseen_keys_change_no_bit(name: str) -> None:
    inputs = make_inputs([200], 1, 8, 8)
    odd = torch.arange(200) | 1
    visible = KeyRanges(odd, odd + 1)  # only the tokens at even places see those keys: each its own
    before = run(OPERATORS[name], inputs, visible)[0]
    inputs.k[::2] *= 1e4
    after = run(OPERATORS[name], inputs, visible)[0]
    assert torch.equal(before[1::2], after[1::2])
    assert not torch.equal(before[::2], after[::2])


@needs_kernels
@each_operator
def test_the_operator_obeys_the_rules_of_torch_library(operator: Operator) -> None:
    lengths = [3, 0, 20]
    inputs = make_inputs(lengths, 2, 4, 6)
    given = dict(
        zip(operator.names, (x.detach().float().requires_grad_() for x in operator.leaves(inputs)), strict=True)
    )
    visible = make_mask("random", lengths)
    q, k, v = (given.get(name) for name in ("q", "k", "v"))
    if operator is OPERATORS["softmax"]:
        torch.library.opcheck(torch.ops.turbogr.softmax_attention.default, (q, k, v, inputs.offsets, *visible, 0.5))
        return
    times = (inputs.query_times, inputs.key_times) if "position_weight" in given else (None, None)
    weights = given.get("position_weight"), given.get("time_weight", given.get("decay"))
    name = "hstu_attention" if operator.channels == 1 else "fuxi_attention"
    rest = inputs.max_len, "days" if "decay" in given else "table", ALPHA if name == "hstu_attention" else 1.0
    target: Any = getattr(torch.ops.turbogr, name).default
    torch.library.opcheck(target, (q, k, v, inputs.offsets, *visible, *times, *weights, *rest))


@needs_kernels
@each_operator
def test_torch_compile_sees_through_it(operator: Operator) -> None:
    lengths = [20, 9]
    inputs, visible = make_inputs(lengths, 2, 4, 6), make_mask("random", lengths)
    variables = [x.detach().float().requires_grad_() for x in operator.leaves(inputs)]

    def attend(visible: KeyRanges, *leaves: Tensor) -> Tensor:
        return operator.bind(inputs, visible)(*leaves)

    torch._dynamo.reset()  # one function for all operators would reach the limit of compilations
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(visible, *variables), attend(visible, *variables))
    with pytest.raises(ValueError, match=r"visible\.last must be at most the length"):
        compiled(visible._replace(last=visible.last + 21), *variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": torch.zeros(4, dtype=torch.int64)}, r"visible\.first must have shape \(5\)"),
        ({"last": torch.zeros(5, dtype=torch.int32)}, r"visible\.last must be int64, got torch\.int32"),
        ({"first": torch.tensor([0, 0, -1, 0, 0])}, r"visible\.first must not be negative, got -1 at token 2"),
        ({"last": torch.tensor([3, 3, 3, 2, 3])}, "got 3 at token 4, whose sequence has 2 tokens"),
    ],
)
@each_operator
def test_ranges_that_do_not_fit_are_refused(operator: Operator, change: dict[str, Tensor], message: str) -> None:
    inputs = make_inputs([3, 2], 2, 3, 3)
    visible = causal_ranges(inputs.offsets)._replace(**change)
    with pytest.raises(ValueError, match=message):
        operator.bind(inputs, visible)(*operator.leaves(inputs))


def test_a_row_scale_takes_the_place_of_the_length() -> None:
    inputs = make_inputs([7, 3], 2, 4, 6)
    visible = make_mask("random", [7, 3])
    scale = torch.rand(10, dtype=torch.float64).requires_grad_()

    def attend(row_scale: Tensor | float | None) -> Tensor:
        options = {"max_len": inputs.max_len, "visible": visible, "row_scale": row_scale}
        return hstu_attention(inputs.q, inputs.k, inputs.v, inputs.offsets, **options)

    plain = attend(None) * inputs.max_len
    torch.testing.assert_close(attend(0.25), plain / 4)
    torch.testing.assert_close(attend(scale), plain * scale[:, None, None])
    assert torch.autograd.gradcheck(attend, scale)
    with pytest.raises(ValueError, match="row_scale must have shape"):
        attend(scale[:-1])
    with pytest.raises(ValueError, match="row_scale must be"):
        attend(scale.float())


def test_alpha_multiplies_the_scores() -> None:
    inputs = make_inputs([40, 3], 2, 4, 6)
    attend = OPERATORS["hstu without bias"].bind(inputs, None)
    scaled = hstu_attention(ALPHA * inputs.q, inputs.k, inputs.v, inputs.offsets, max_len=inputs.max_len)
    torch.testing.assert_close(attend(*inputs[:3]), scaled)


def rule_mask(n: int, targets: int, contextual: int, window: int, full_tail: int, causal: bool) -> Tensor:
    """The mask of one sequence by the rule in README.md, pair by pair."""

    def number(i: int) -> int:
        return min(i if contextual == 0 else max(i - contextual + 1, 0), after)

    after = n - targets - max(contextual - 1, 0)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            ahead = number(i) - number(j) if causal else abs(number(i) - number(j))
            exempt = full_tail > 0 and number(i) >= after - full_tail
            sees = i == j or ahead > 0
            sees = sees and (window == 0 or ahead <= window or exempt)
            mask[i, j] = sees or (contextual > 0 and number(i) == 0 and number(j) < after)
    return mask


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])
@pytest.mark.parametrize("contextual", [0, 1, 3])
@pytest.mark.parametrize("with_targets", [True, False], ids=["targets", "no targets"])
def test_ranges_follow_the_rule(with_targets: bool, contextual: int, causal: bool) -> None:
    history, targets = [7, 0, 12, 5, 0, 1, 9], [3, 2, 0, 4, 0, 1, 1]
    targets = targets if with_targets else [0] * 7
    lengths = [contextual + h + t for h, t in zip(history, targets, strict=True)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    for window in (0, 1, 4, 30):
        for full_tail in (0, 1, 5, 40):
            options = {"num_contextual": contextual, "window": window, "full_tail": full_tail, "causal": causal}
            visible = hstu_ranges(offsets, num_targets=torch.tensor(targets) if with_targets else None, **options)
            for start, n, count in zip(offsets.tolist(), lengths, targets, strict=False):
                expected = rule_mask(n, count, contextual, window, full_tail, causal)
                assert torch.equal(dense_mask(visible, start, n), expected), (n, count, options)


def test_ranges_of_no_sequences() -> None:
    for offsets in (torch.tensor([0]), torch.tensor([0, 0])):
        assert hstu_ranges(offsets, num_contextual=2, window=3).first.shape == (0,)
        assert causal_ranges(offsets).last.shape == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window must not be negative, got -1"),
        ({"num_targets": torch.tensor([1])}, r"num_targets must have shape \(2\)"),
        ({"num_targets": torch.tensor([1.0, 0.0])}, "num_targets must be int64"),
        ({"num_targets": torch.tensor([1, -1])}, "sequence 1 has 2 tokens, which cannot be 0 .* -1 targets"),
        ({"num_targets": torch.tensor([2, 1]), "num_contextual": 2}, "cannot be 2 contextual tokens and 1 targets"),
    ],
)
def test_parts_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hstu_ranges(torch.tensor([0, 5, 7]), **options)
