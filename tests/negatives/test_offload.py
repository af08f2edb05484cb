"""The loss in segments: the same loss, two segments at a time, the next one fetched while one is scored."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr.negatives import offload
from turbogr.negatives.offload import HostLink, segment_bounds, segmented_softmax
from turbogr.ops import sampled_softmax
from turbogr.ops.sampled_softmax import Precision


def make_inputs(num_positions: int, num_negatives: int, *, group: int | None = None, seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    num_rows, width = 60, 10
    groups = None
    if group is not None:
        groups = torch.tensor([*range(0, num_positions, group), num_positions])
    num_groups = num_positions if groups is None else groups.numel() - 1
    return {
        "queries": torch.randn(num_positions, width, generator=random).requires_grad_(),
        "rows": torch.randn(num_rows, width, generator=random).requires_grad_(),
        "positives": torch.randint(0, num_rows, (num_positions,), generator=random),
        "negatives": torch.randint(0, num_rows, (num_groups, num_negatives), generator=random, dtype=torch.int32),
        "temperature": 0.1,
        "log_q": torch.randn(num_rows, generator=random),
        "groups": groups,
        "precision": "fp32",
    }


def gradients(loss: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    weights = torch.linspace(0.5, 2.0, loss.numel())
    return torch.autograd.grad(loss, [inputs["queries"], inputs["rows"]], weights)


@pytest.mark.parametrize("group", [None, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("budget", [1.0, 5_000.0, 1e9], ids=["smallest", "some", "all"])
def test_segments_give_the_loss_of_one_piece(group: int | None, precision: Precision, budget: float) -> None:
    inputs = {**make_inputs(20, 7, group=group), "precision": precision}
    whole, parts = sampled_softmax(**inputs), segmented_softmax(**inputs, budget_bytes=budget)
    torch.testing.assert_close(parts, whole)
    for a, b in zip(gradients(parts, inputs), gradients(whole, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_positions_have_no_loss() -> None:
    inputs = make_inputs(0, 7)
    loss = segmented_softmax(**inputs, budget_bytes=1e6)
    assert loss.shape == (0,)
    assert all(not gradient.any() for gradient in gradients(loss, inputs))


class CountingLink(HostLink):
    """Knows how many rows lie on the device at the most, and in which order things happen."""

    def __init__(self) -> None:
        self.largest, self.brought, self.returned = 0, 0, 0

    def bring(self, rows: Tensor, ids: Tensor, buffer: Tensor) -> None:
        self.largest = max(self.largest, buffer.untyped_storage().nbytes())
        self.brought += 1
        super().bring(rows, ids, buffer)

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor) -> None:
        self.returned += 1
        super().return_(gradient, ids, total)


def test_memory_on_the_device_does_not_grow_with_the_negatives() -> None:
    sizes = {}
    for num_negatives in (32, 128, 512, 1024):
        inputs = make_inputs(256, num_negatives)
        inputs["rows"] = torch.randn(100_000, 10).requires_grad_()
        inputs["negatives"] = torch.randint(0, 100_000, (256, num_negatives))
        inputs["log_q"] = None
        link = CountingLink()
        loss = segmented_softmax(**inputs, budget_bytes=200_000, link=link)
        gradients(loss, inputs)
        assert link.returned == link.brought / 2 > 1
        sizes[num_negatives] = link.largest
    assert all(90_000 / 2 < size <= 100_000 for size in sizes.values()), sizes


def test_segments_follow_the_budget() -> None:
    assert segment_bounds((10, 99), (10, 8), 2 * 4 * 8 * 100 * 4) == [0, 4, 8, 10]
    assert segment_bounds((10, 99), (10, 8), 1) == list(range(11))
    assert segment_bounds((10, 99), (10, 8), 1e9) == [0, 10]
    assert segment_bounds((0, 99), (0, 8), 1e9) == [0]


class SlowLink(HostLink):
    """A copy that does not end before the main thread has begun to score the segment before."""

    def __init__(self) -> None:
        self.scoring = threading.Semaphore(1)  # nothing is scored while the first segment comes

    def bring(self, rows: Tensor, ids: Tensor, buffer: Tensor) -> None:
        assert self.scoring.acquire(timeout=20), "the segment before is not being scored"
        super().bring(rows, ids, buffer)


def test_the_next_segment_comes_while_one_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SlowLink()

    def score(*args: Any, **options: Any) -> Tensor:
        link.scoring.release()
        return sampled_softmax(*args, **options)

    monkeypatch.setattr(offload, "sampled_softmax", score)
    inputs = make_inputs(20, 7)
    loss = segmented_softmax(**inputs, budget_bytes=5_000.0, link=link)
    link.scoring = threading.Semaphore(1)
    torch.testing.assert_close(loss, sampled_softmax(**inputs))
    found = gradients(loss, inputs)
    for a, b in zip(found, gradients(sampled_softmax(**inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class BrokenLink(HostLink):
    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor) -> None:
        raise RuntimeError("the copy failed")


def test_an_error_of_the_worker_is_raised_and_nothing_hangs() -> None:
    inputs = make_inputs(20, 7)
    loss = segmented_softmax(**inputs, budget_bytes=1e9, link=BrokenLink())
    with pytest.raises(RuntimeError, match="the copy failed"):
        gradients(loss, inputs)
    inputs["positives"] = inputs["positives"] + 1000
    with pytest.raises(ValueError, match="outside"):
        segmented_softmax(**inputs, budget_bytes=1e9)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("turbogr-offload")]
