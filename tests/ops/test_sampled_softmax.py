"""sampled_softmax: every backend against the definition in fp64, judged by the error of plain fp32."""

from __future__ import annotations

import pytest
import torch

from turbogr.ops import native, registry, sampled_softmax
from turbogr.ops.sampled_softmax import cpu, reference

SHAPES = [  # tokens, negatives, rows, width
    (0, 4, 5, 3),
    (1, 0, 1, 1),
    (1, 1, 2, 7),
    (3, 3, 5, 8),
    (17, 5, 9, 17),
    (63, 65, 40, 50),
    (65, 128, 300, 64),
    (40, 127, 5000, 33),
]

needs_kernels = pytest.mark.skipif(
    native.why_not(torch.device("cpu"), torch.float32) is not None, reason="the C++ kernels are not built"
)


def make_inputs(shape: tuple[int, int, int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    num_tokens, num_negatives, num_rows, width = shape
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=random)

    return {
        "queries": normal(num_tokens, width),
        "rows": normal(num_rows, width),
        "positives": torch.randint(0, num_rows, (num_tokens,), generator=random),
        "negatives": torch.randint(0, num_rows, (num_tokens, num_negatives), generator=random),
        "log_q": normal(num_rows),
        "grad": normal(num_tokens),
    }


def evaluate(
    inputs: dict[str, torch.Tensor], backend: str, dtype: torch.dtype, *, normalize: bool, with_log_q: bool
) -> list[torch.Tensor]:
    queries = inputs["queries"].to(dtype, copy=True).requires_grad_()
    rows = inputs["rows"].to(dtype, copy=True).requires_grad_()
    with registry.backend(backend):
        loss = sampled_softmax(
            queries,
            rows,
            inputs["positives"],
            inputs["negatives"],
            temperature=0.05 if normalize else 2.0,
            normalize=normalize,
            log_q=inputs["log_q"].to(dtype) if with_log_q else None,
        )
        loss.backward(inputs["grad"].to(dtype))
    assert queries.grad is not None and rows.grad is not None
    return [loss.detach().double(), queries.grad.double(), rows.grad.double()]


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("with_log_q", [True, False])
def test_errors_are_those_of_plain_fp32(shape: tuple[int, int, int, int], normalize: bool, with_log_q: bool) -> None:
    inputs = make_inputs(shape)
    options = {"normalize": normalize, "with_log_q": with_log_q}
    exact = evaluate(inputs, "reference", torch.float64, **options)
    plain = evaluate(inputs, "reference", torch.float32, **options)
    ours = evaluate(inputs, "auto", torch.float32, **options)
    for name, e, p, o in zip(("loss", "queries", "rows"), exact, plain, ours, strict=True):
        floor = 1e-6 * max(1.0, float(e.norm()))
        assert float((o - e).norm()) <= 2 * float((p - e).norm()) + floor, name


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_every_instruction_set_agrees(isa: str) -> None:
    if isa not in native.available_isas():
        pytest.skip(f"this processor does not run {isa}")
    inputs = make_inputs((63, 65, 40, 50))
    exact = evaluate(inputs, "reference", torch.float64, normalize=True, with_log_q=True)
    before = native.isa()
    native.set_isa(isa)
    try:
        ours = evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=True)
    finally:
        native.set_isa(before)
    for e, o in zip(exact, ours, strict=True):
        assert float((o - e).norm()) <= 1e-5 * max(1.0, float(e.norm()))


@needs_kernels
def test_the_result_does_not_depend_on_the_threads() -> None:
    inputs = make_inputs((500, 20, 90, 24))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=False))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_negative_that_is_the_positive_does_not_count(backend: str) -> None:
    inputs = make_inputs((6, 3, 8, 5))
    inputs["negatives"][:, 1] = inputs["positives"]
    hidden = dict(inputs, negatives=inputs["negatives"][:, [0, 2]])
    left, right = (evaluate(i, backend, torch.float32, normalize=True, with_log_q=False) for i in (inputs, hidden))
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("place", ["queries", "rows"])
def test_a_nan_reaches_the_loss(backend: str, place: str) -> None:
    inputs = make_inputs((4, 3, 6, 5))
    inputs["negatives"][2, 1] = 3
    inputs[place][2 if place == "queries" else 3, 1] = float("nan")
    loss, *_ = evaluate(inputs, backend, torch.float32, normalize=True, with_log_q=False)
    assert loss[2].isnan()


@needs_kernels
def test_probabilities_that_are_not_kept_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs((65, 30, 50, 20))
    kept = evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=True)
    monkeypatch.setattr(cpu, "_MAX_KEPT", 0)
    again = evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=True)
    for a, b in zip(kept, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@needs_kernels
def test_a_vector_of_zeros_keeps_the_gradient_of_the_definition() -> None:
    inputs = make_inputs((9, 6, 7, 12))
    inputs["rows"][2] = 0
    inputs["queries"][4] = 0
    exact = evaluate(inputs, "reference", torch.float64, normalize=True, with_log_q=False)
    ours = evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=False)
    for e, o in zip(exact, ours, strict=True):
        torch.testing.assert_close(o, e, rtol=1e-4, atol=1e-4)


def test_the_definition_has_the_gradient_it_claims() -> None:
    inputs = make_inputs((4, 3, 5, 3))
    assert torch.autograd.gradcheck(
        lambda q, r: reference.sampled_softmax(
            q, r, inputs["positives"], inputs["negatives"], 0.7, True, inputs["log_q"]
        ),
        (inputs["queries"].requires_grad_(), inputs["rows"].requires_grad_()),
    )


@needs_kernels
def test_the_operator_obeys_the_rules_of_torch_library() -> None:
    inputs = make_inputs((5, 4, 6, 8))
    arguments = (
        inputs["queries"].float().requires_grad_(),
        inputs["rows"].float().requires_grad_(),
        inputs["positives"],
        inputs["negatives"],
        None,
        0.05,
        True,
        True,
    )
    torch.library.opcheck(torch.ops.turbogr.sampled_softmax.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positives": torch.tensor([0, 9])}, "positives holds 9, outside 0 to 4"),
        ({"negatives": torch.tensor([[0], [-1]])}, "negatives holds -1, outside 0 to 4"),
        ({"rows": torch.zeros(5, 4)}, "rows must have shape"),
        ({"positives": torch.tensor([0])}, "positives must have shape"),
        ({"log_q": torch.zeros(4)}, "log_q must have shape"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "queries": torch.zeros(2, 3),
        "rows": torch.zeros(5, 3),
        "positives": torch.tensor([0, 1]),
        "negatives": torch.tensor([[0], [1]]),
        "temperature": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        sampled_softmax(**arguments)  # type: ignore[arg-type]
