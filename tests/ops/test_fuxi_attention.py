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
from turbogr.ops import DecayBias, InversePowerBias, RelativeBias, SecondsDecayBias, fuxi_attention, native, registry
from turbogr.ops.jagged_attention.reference import FORMS

CASES = {
    "no sequences": ([], 2, 4, 4),
    "only empty sequences": ([0, 0], 2, 4, 4),
    "one token": ([1], 1, 1, 1),
    "around a block": ([0, 95, 96, 97, 1, 17], 2, 16, 8),
    "two hundred": ([200, 17, 63], 1, 50, 50),
    "several key ranges": ([1300, 20], 1, 8, 24),
}
Kind = type[RelativeBias] | type[DecayBias] | type[InversePowerBias] | type[SecondsDecayBias]
PARAMETERS: dict[Kind, list[float]] = {
    DecayBias: [0.7, 0.6, 0.8],
    InversePowerBias: [0.7, 0.5],
    SecondsDecayBias: [0.7, 0.15, 0.8],
}
every_kind = pytest.mark.parametrize("kind", [RelativeBias, *PARAMETERS])


def attend(inputs: AttentionInputs, kind: Kind) -> Callable[..., Tensor]:

    def function(v: Tensor, position_weight: Tensor, time_weight: Tensor, *qk: Tensor) -> Tensor:
        bias = kind(inputs.query_times, inputs.key_times, position_weight, time_weight)
        q, k = qk or (None, None)
        return fuxi_attention(q, k, v, inputs.offsets, bias, max_len=inputs.max_len)

    return function


def leaves(inputs: AttentionInputs, kind: Kind, content: bool) -> list[Tensor]:
    parameters = PARAMETERS.get(kind)
    time_weight = inputs.time_weight if parameters is None else torch.tensor(parameters, dtype=torch.float64)
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
@every_kind
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
def test_forward_and_gradients(case: tuple[list[int], int, int, int], kind: Kind, content: bool) -> None:
    inputs = make_inputs(*case)
    variables = leaves(inputs, kind, content)
    names = NAMES[: len(variables)]
    assert_close_as_plain(attend(inputs, kind), variables, gradient(inputs, content), names)


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@every_kind
def test_every_instruction_set(isa: str, kind: Kind) -> None:
    inputs = make_inputs([0, 1, 97, 130], 2, 20, 12)
    with instruction_set(isa):
        assert_close_as_plain(attend(inputs, kind), leaves(inputs, kind, True), gradient(inputs, True), NAMES)


@needs_kernels
@every_kind
def test_the_number_of_threads_changes_no_bit(kind: Kind) -> None:
    inputs = make_inputs([900, 5, 40], 2, 8, 8)
    arguments = attend(inputs, kind), leaves(inputs, kind, True), gradient(inputs, True)
    assert_independent_of_threads(lambda: with_gradients(*arguments, "auto", torch.float32))


@needs_kernels
@pytest.mark.parametrize("span", [1, 2**33], ids=["all at once", "beyond 32 bits"])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_any_times_decay(span: int, kind: Kind) -> None:
    inputs = make_inputs([110], 1, 4, 4, span=span)
    assert_close_as_plain(attend(inputs, kind), leaves(inputs, kind, True), gradient(inputs, True), NAMES)


@needs_kernels
@pytest.mark.parametrize("kind", [InversePowerBias, SecondsDecayBias])
def test_events_at_once_and_before_the_query(kind: Kind) -> None:
    """Δ = 0 has the weight a, and of a key after the query the inverse power takes Δ as 0, the decay |Δ|."""
    times = torch.tensor([0, 100, 100, 40]), torch.tensor([0, 0, 100, 100])
    v, position = torch.eye(4, dtype=torch.float64)[:, None], torch.zeros(7, dtype=torch.float64)
    parameters = torch.tensor(PARAMETERS[kind], dtype=torch.float64)
    a = float(parameters[0])
    distances = [60] if kind is SecondsDecayBias else [0]
    found = {
        InversePowerBias: [a * 101**-0.5, a * (distances[0] + 1) ** -0.5],
        SecondsDecayBias: [a * 0.8 ** (100**0.15), a * 0.8 ** (60**0.15)],
    }[kind]  # type: ignore[index]
    for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        with registry.backend(backend):
            bias = kind(*times, position.to(dtype), parameters.to(dtype))
            out = fuxi_attention(None, None, v.to(dtype), torch.tensor([0, 4]), bias, max_len=4)
        weights = out[:, 0, 4:].double()
        expected = [weights[0, 0], weights[2, 2], weights[1, 0], weights[3, 3]]
        assert torch.allclose(torch.stack(expected), torch.tensor([a, a, *found], dtype=torch.float64), atol=1e-6)


@needs_kernels
def test_a_power_beyond_all_floats_leaves_no_gradient() -> None:
    """Of γ^(x^β) with a large β the weight is 0, and so is what its parameters get from it."""
    inputs = make_inputs([40], 1, 4, 4, span=2**33)
    decay = torch.tensor([0.7, 4.0, 0.8])
    v, position, decay = (x.float().detach().requires_grad_() for x in (inputs.v, inputs.position_weight, decay))
    with registry.backend("cpu"):
        attend(inputs, SecondsDecayBias)(v, position, decay).sum().backward()
    assert decay.grad is not None and decay.grad.isfinite().all() and float(decay.grad[1].abs()) < 1e-6


@needs_kernels
@every_kind
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
def test_the_operator_obeys_the_rules_of_torch_library(kind: Kind, content: bool) -> None:
    inputs = make_inputs([3, 0, 20], 2, 4, 6)
    v, position_weight, time_weight, *qk = (x.detach().float().requires_grad_() for x in leaves(inputs, kind, content))
    q, k = qk or (None, None)
    times = inputs.query_times, inputs.key_times
    weights = position_weight, time_weight
    form = FORMS[[RelativeBias, DecayBias, InversePowerBias, SecondsDecayBias].index(kind)]
    arguments = (q, k, v, inputs.offsets, None, None, *times, *weights, inputs.max_len, form, 1.0)
    torch.library.opcheck(torch.ops.turbogr.fuxi_attention.default, arguments)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_no_distance_in_time_is_beyond_the_last_bucket(isa: str) -> None:
    """2^31 - 1 s is the largest distance of 32 bits; what follows the table in memory must not matter."""
    num, memory = 20, torch.full((66,), 1e6)
    memory[:65] = torch.arange(65.0)
    query_times = 50_000_000 * torch.arange(num)
    query_times[-1] = 2**31 - 1
    bias = RelativeBias(query_times, torch.zeros_like(query_times), torch.zeros(2 * num - 1), memory[:65])
    args = None, None, torch.ones(num, 1, 8), torch.tensor([0, num]), bias
    with instruction_set(isa):
        found = fuxi_attention(*args, max_len=num)
    with registry.backend("reference"):
        assert torch.equal(found, fuxi_attention(*args, max_len=num))
