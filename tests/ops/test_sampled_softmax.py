"""sampled_softmax: every backend against the definition in fp64, judged by the error of plain fp32."""

from __future__ import annotations

import pytest
import torch

from tests.ops.judging import assert_independent_of_threads, instruction_set, needs_kernels
from turbogr.ops import native, registry, sampled_softmax
from turbogr.ops.sampled_softmax import Precision, cpu, reference

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
    inputs: dict[str, torch.Tensor],
    backend: str,
    dtype: torch.dtype,
    *,
    normalize: bool,
    with_log_q: bool,
    precision: Precision = "fp32",
    keep: bool = True,
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
            groups=inputs.get("groups"),
            precision=precision,
            keep=keep,
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


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_nan_reaches_no_position_without_it(backend: str, precision: Precision) -> None:
    inputs = make_inputs((4, 3, 6, 5))
    inputs["positives"], inputs["negatives"] = inputs["positives"].clamp(min=1), inputs["negatives"].clamp(min=1)
    inputs["negatives"][2, 1] = 0
    inputs["rows"][0, 1] = float("nan")
    loss, *_ = evaluate(inputs, backend, torch.float32, normalize=True, with_log_q=False, precision=precision)
    assert loss.isnan().tolist() == [False, False, True, False]


@needs_kernels
def test_probabilities_that_are_not_kept_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs((65, 30, 50, 20))
    kept = evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=True)
    results = [evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=True, keep=False)]
    monkeypatch.setattr(cpu, "_MAX_KEPT", 0)
    results.append(evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=True))
    for again in results:
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
            q, r, inputs["positives"], inputs["negatives"], 0.7, True, inputs["log_q"], None, "fp32"
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
        None,
        0.05,
        True,
        "fp16",
        True,
        True,
    )
    torch.library.opcheck(torch.ops.turbogr.sampled_softmax.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positives": torch.tensor([0, 9])}, r"positives holds 9 at \(1,\), outside 0 to 4"),
        ({"negatives": torch.tensor([[0], [-1]])}, r"negatives holds -1 at \(1, 0\), outside 0 to 4"),
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


GROUPED = [  # sizes of groups, negatives, rows, width
    ([1], 1, 2, 1),
    ([2, 1], 3, 5, 7),
    ([1, 1, 1], 4, 3, 16),
    ([3, 5, 2, 1], 17, 9, 17),
    ([4] * 30 + [3], 65, 40, 50),
    ([16, 2, 13, 16], 64, 300, 64),
    ([25, 7], 129, 5000, 33),
]


def make_grouped(sizes: list[int], num_negatives: int, num_rows: int, width: int) -> dict[str, torch.Tensor]:
    inputs = make_inputs((sum(sizes), num_negatives, num_rows, width))
    inputs["groups"] = torch.tensor([0, *sizes]).cumsum(0)
    inputs["negatives"] = inputs["negatives"][: len(sizes)]
    return inputs


# Rounding may fall to the other side in fp64: a step of the last place of some elements.
TOLERANCES: list[tuple[Precision, float]] = [("fp32", 2e-6), ("fp16", 3e-4), ("int8", 3e-3)]


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize(("precision", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("kept", [True, False])
def test_groups_and_precisions_follow_the_definition(
    isa: str, precision: Precision, tolerance: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(cpu, "_MAX_KEPT", 0)
    cases = [make_grouped(*shape) for shape in GROUPED] + [make_inputs(shape) for shape in SHAPES]
    with instruction_set(isa):
        for inputs in cases:
            for normalize, with_log_q in ((True, False), (True, True), (False, True)):
                options = {"normalize": normalize, "with_log_q": with_log_q}
                exact = evaluate(inputs, "reference", torch.float64, precision=precision, **options)
                plain = evaluate(inputs, "reference", torch.float32, precision=precision, **options)
                ours = evaluate(inputs, "auto", torch.float32, precision=precision, **options)
                for name, e, p, o in zip(("loss", "queries", "rows"), exact, plain, ours, strict=True):
                    allowed = 2 * float((p - e).norm()) + tolerance * max(1.0, float(e.norm()))
                    assert float((o - e).norm()) <= allowed, (name, tuple(inputs["negatives"].shape), options)


@needs_kernels
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_rows_that_the_precision_holds_lose_nothing(precision: Precision) -> None:
    inputs = make_inputs((30, 20, 50, 24))
    inputs["rows"] = torch.randint(-127, 128, inputs["rows"].shape, generator=torch.Generator().manual_seed(1)).double()
    inputs["rows"][:, 0] = 127
    inputs["queries"] *= 0.01
    wide, narrow = (
        evaluate(inputs, "auto", torch.float32, normalize=False, with_log_q=True, precision=p)
        for p in ("fp32", precision)
    )
    for a, b in zip(wide, narrow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_only_negatives_are_narrowed(backend: str) -> None:
    inputs = make_inputs((9, 0, 12, 10))
    wide, narrow = (
        evaluate(inputs, backend, torch.float32, normalize=True, with_log_q=False, precision=p)
        for p in ("fp32", "int8")
    )
    assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))
    inputs = make_inputs((9, 5, 12, 10))
    wide, narrow = (
        evaluate(inputs, backend, torch.float32, normalize=True, with_log_q=False, precision=p)
        for p in ("fp32", "int8")
    )
    assert not torch.equal(wide[0], narrow[0])
    torch.testing.assert_close(wide[0], narrow[0], rtol=0.0, atol=0.2)


@needs_kernels
@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
def test_halves_are_rounded_as_ieee_says(isa: str) -> None:
    """One row per value, alone in a vector of one column: the loss is a function of the rounded value."""
    values = [0.0, 1.0, -1.0, 65504.0, 65519.0, 6e-5, -5.97e-8, 2.98e-8, 1e-10, 0.333333, 1.00048828125, 1.00146484375]
    rows = torch.tensor([[0.0], *([v] for v in values)])
    count = len(values)
    for sign in (1.0, -1.0):
        queries = torch.tensor([[sign / max(abs(v), 1e-7)] for v in values])
        arguments = (queries, rows, torch.zeros(count, dtype=torch.int64), torch.arange(1, count + 1)[:, None])
        with instruction_set(isa):
            ours = sampled_softmax(*arguments, temperature=1.0, normalize=False, precision="fp16")
        with registry.backend("reference"):
            exact = sampled_softmax(*arguments, temperature=1.0, normalize=False, precision="fp16")
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("place", ["queries", "rows"])
def test_a_nan_reaches_the_loss_of_its_group(backend: str, precision: Precision, place: str) -> None:
    inputs = make_grouped([2, 3], 4, 8, 5)
    inputs["negatives"] = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6]])
    inputs["positives"] = torch.tensor([0, 1, 2, 1, 0])
    inputs[place][3, 1] = float("nan")
    loss, *_ = evaluate(inputs, backend, torch.float32, normalize=True, with_log_q=False, precision=precision)
    expected = [False, False, True, True, True] if place == "rows" else [False, False, False, True, False]
    assert loss.isnan().tolist() == expected


@needs_kernels
def test_groups_do_not_depend_on_the_threads() -> None:
    inputs = make_grouped([4] * 100 + [3], 20, 90, 24)
    assert_independent_of_threads(
        lambda: evaluate(inputs, "auto", torch.float32, normalize=True, with_log_q=False, precision="fp16")
    )


def test_groups_that_do_not_fit_are_refused() -> None:
    arguments = (torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 2]))
    options = {"temperature": 1.0}
    pools = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="offsets must run from 0 to the 3 values"):
        sampled_softmax(*arguments, pools, groups=torch.tensor([0, 1, 2]), **options)
    with pytest.raises(ValueError, match="offsets leave sequence 1 empty"):
        sampled_softmax(*arguments, pools, groups=torch.tensor([0, 3, 3]), **options)
    with pytest.raises(ValueError, match="negatives must have shape"):
        sampled_softmax(*arguments, pools, groups=torch.tensor([0, 3]), **options)
    with pytest.raises(ValueError, match="precision must be one of fp32, fp16, int8"):
        sampled_softmax(*arguments, pools, groups=torch.tensor([0, 1, 3]), precision="int4", **options)  # type: ignore[arg-type]
