"""The loss in segments: the same loss, two segments at a time, the next one fetched while one is scored.

Nothing here is an accelerator. `SlowDevice` stands for one: it does what is posted to it when it is waited for, and not
before, so code that forgets to wait reads the old values.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr import streams
from turbogr.negatives import offload
from turbogr.negatives.host_link import DirectLink, StagedLink, Units, link_to
from turbogr.negatives.offload import segment_bounds, segmented_softmax
from turbogr.ops import sampled_softmax
from turbogr.ops.sampled_softmax import Precision
from turbogr.streams import CopyStream


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


class SlowDevice:
    """Counts what passes through its pinned memory; `posted` is done by `synchronize` alone."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.posted: list[Callable[[], object]] = []
        self.pinned_bytes = 0
        self.scored = 0
        self.followed: list[int] = []

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        room = torch.zeros(shape, dtype=dtype)
        self.pinned_bytes += room.nbytes
        return room.fill_(float("nan")) if dtype.is_floating_point else room

    def record_caller(self) -> int:
        return self.scored

    def wait_event(self, event: int) -> None:
        self.followed.append(event)

    def post(self, work: Callable[[], object]) -> None:
        self.posted.append(work)

    def synchronize(self) -> None:
        while self.posted:
            self.posted.pop(0)()


def make_link(name: str, precision: Precision) -> DirectLink | StagedLink:
    return DirectLink() if name == "direct" else StagedLink(SlowDevice(), precision)


@pytest.mark.parametrize("group", [None, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("link", ["direct", "staged"])
@pytest.mark.parametrize("budget", [1.0, 9_000.0, 1e9], ids=["smallest", "some", "all"])
def test_segments_give_the_loss_of_one_piece(group: int | None, precision: Precision, link: str, budget: float) -> None:
    inputs = {**make_inputs(20, 7, group=group), "precision": precision}
    with torch.no_grad():
        inputs["rows"][:2] *= torch.tensor([[0.0], [1e-8]])
    whole = sampled_softmax(**inputs)
    parts = segmented_softmax(**inputs, budget_bytes=budget, link=make_link(link, precision))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(parts, inputs), gradients(whole, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rows_that_fit_the_budget_on_a_cpu_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {**make_inputs(20, 7, group=3), "precision": "fp16"}
    whole = sampled_softmax(**inputs)
    monkeypatch.setattr(offload, "_Segmented", None)
    parts = segmented_softmax(**inputs, budget_bytes=2 * 60 * 10)
    torch.testing.assert_close(parts, whole, rtol=0.0, atol=0.0)
    for a, b in zip(gradients(parts, inputs), gradients(whole, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(AttributeError):
        segmented_softmax(**inputs, budget_bytes=2 * 60 * 10 - 1)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("link", ["direct", "staged"])
def test_a_nan_reaches_the_loss(precision: Precision, link: str) -> None:
    inputs = {**make_inputs(20, 7), "precision": precision}
    inputs["positives"], inputs["negatives"] = inputs["positives"].clamp(min=1), inputs["negatives"].clamp(min=1)
    inputs["negatives"][13, 2] = 0
    with torch.no_grad():
        inputs["rows"][0, 4] = float("nan")
    loss = segmented_softmax(**inputs, budget_bytes=9_000.0, link=make_link(link, precision))
    assert loss.isnan().nonzero().flatten().tolist() == [13]


def test_no_positions_have_no_loss() -> None:
    for name in ("direct", "staged"):
        inputs = make_inputs(0, 7)
        loss = segmented_softmax(**inputs, budget_bytes=1e6, link=make_link(name, "fp32"))
        assert loss.shape == (0,)
        assert all(not gradient.any() for gradient in gradients(loss, inputs))


@pytest.mark.parametrize(("precision", "share"), [("fp16", 0.5), ("int8", 0.25)])
def test_negatives_are_copied_in_their_precision(precision: Precision, share: float) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(5000, 64, generator=random)
    units = Units(rows, rows.norm(dim=1).reciprocal())
    ids, exact = torch.arange(0, 5000, 2), torch.tensor([7, 3, 7], dtype=torch.int32)
    sent = {}
    for name in ("fp32", precision):
        device, buffer = SlowDevice(), torch.full((2500, 64), float("nan"))
        StagedLink(device, name).bring(units, ids, exact, buffer, 0)
        sent[name] = device.pinned_bytes
        wanted = units.rows[ids] * units.inverse[ids][:, None]
        torch.testing.assert_close(buffer[[3, 7]], wanted[[3, 7]], rtol=0.0, atol=0.0)
        bound = {"fp32": 0.0, "fp16": 2**-11, "int8": 0.51 / 127}[name]
        largest = wanted.abs().amax(1, keepdim=True)
        assert ((buffer - wanted).abs() <= bound * largest).all()
    assert sent["fp32"] == 4 * 64 * 2500
    assert share < sent[precision] / sent["fp32"] < share + 0.02


class CountingLink(DirectLink):
    """Knows how much lies on the device at the most, and how often things come and go."""

    def __init__(self) -> None:
        self.largest, self.brought, self.returned = 0, 0, 0

    def bring(
        self, units: Units, ids: Tensor, exact: Tensor, buffer: Tensor, after: Any, beside: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        self.largest = max(self.largest, buffer.untyped_storage().nbytes())
        self.brought += 1
        return super().bring(units, ids, exact, buffer, after, beside)

    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor, after: Any) -> None:
        self.returned += 1
        super().return_(gradient, ids, total, after)


def test_vectors_on_the_device_do_not_grow_with_the_negatives() -> None:
    sizes = {}
    for num_negatives in (32, 128, 512, 1024):
        inputs = make_inputs(256, num_negatives)
        inputs["rows"] = torch.randn(100_000, 10).requires_grad_()
        inputs["negatives"] = torch.randint(0, 100_000, (256, num_negatives))
        inputs["log_q"] = None
        link = CountingLink()
        loss = segmented_softmax(**inputs, budget_bytes=400_000, link=link)
        gradients(loss, inputs)
        assert link.returned == link.brought / 2 > 1
        sizes[num_negatives] = link.largest
    assert all(80_000 / 2 < size <= 100_000 for size in sizes.values()), sizes


PEAK = """
import sys, torch
from turbogr import ops
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.negatives.offload import segmented_softmax
torch.set_num_threads(1)
ops.keep_freed_memory()
queries, rows = torch.randn(4096, 16).requires_grad_(), torch.randn(50_000, 16).requires_grad_()
positives = torch.randint(0, 50_000, (4096,), dtype=torch.int32)
negatives = torch.randint(0, 50_000, (4096, 1024), dtype=torch.int32)
def run(positions, count, budget):
    some = queries[:positions], rows, positives[:positions], negatives[:positions, :count].contiguous()
    options = {"temperature": 0.1, "log_q": None, "groups": None, "precision": "fp16"}
    score = ops.sampled_softmax if budget is None else segmented_softmax
    loss = score(*some, **options, **({} if budget is None else {"budget_bytes": budget}))
    return torch.autograd.grad(loss.sum(), [queries, rows])
ops.set_backend(sys.argv[1])
positions = int(sys.argv[2])
for count, budget in ((32, 1e6), (1024, 1e6), (32, 4e6), (1024, 4e6), (1024, None)):
    run(16, count, budget)
    before = _resident_bytes("VmRSS")
    _reset_peak()
    run(positions, count, budget)
    print(_resident_bytes("VmHWM") - before - 4 * positions * count)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(("backend", "positions"), [("cpu", 4096), ("reference", 512)])
def test_the_peak_of_memory_is_flat_and_without_segments_it_is_not(backend: str, positions: int) -> None:
    """1 MB makes segments, 4 MB hold a copy of all rows, over which only the compiled operator goes by itself. What the
    ids themselves take is not counted."""
    done = subprocess.run([sys.executable, "-c", PEAK, backend, str(positions)], capture_output=True, check=True)
    few, many, few_copied, many_copied, whole = (int(peak) / 2**20 for peak in done.stdout.split())
    assert many < few + 4 and many_copied < few_copied + 4, (few, many, few_copied, many_copied)
    assert whole > max(many, many_copied) + 8, (many, many_copied, whole)


PEAK_SHARED = """
import sys, torch
from tests.negatives.batches import make_batch
from turbogr import ops
from turbogr.bench._training import _reset_peak, _resident_bytes
from turbogr.config import LossConfig
from turbogr.negatives import LossContext
from turbogr.negatives.sampled_softmax_loss import SampledSoftmaxLoss
torch.set_num_threads(1)
ops.keep_freed_memory()
for expansion, segment_mb in ((2, 2.0), (32, 2.0), (32, None)):
    config = LossConfig(num_negatives=32, expansion=expansion, sharing="positions", segment_mb=segment_mb)
    objective = SampledSoftmaxLoss(config, None, LossContext(20_000, 0))
    def run(length):
        batch = make_batch([length] * 4, 20_000)
        outputs, rows = torch.randn(4 * length, 16).requires_grad_(), torch.randn(20_000, 16).requires_grad_()
        positives, negatives, ids = batch.targets.int(), objective.draw(batch, 0), torch.arange(20_000)
        before = _resident_bytes("VmRSS")
        _reset_peak()
        objective.loss(outputs, rows, positives, negatives, ids, batch, 0).sum().backward()
        return _resident_bytes("VmHWM") - before
    run(16)
    print(run(1024))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_what_positions_take_of_others_stays_in_the_budget() -> None:
    """All ids, [4096, 32 * 32], would be 16 MB. The gradient of the rows, 1.3 MB, is counted."""
    done = subprocess.run([sys.executable, "-c", PEAK_SHARED], capture_output=True, check=True)
    few, many, whole = (int(peak) / 2**20 for peak in done.stdout.split())
    assert many < few + 4, (few, many)
    assert whole > many + 12, (many, whole)


def test_segments_follow_the_budget() -> None:
    group = 100 * 4 * 4 * 8 + 99 * 16
    assert segment_bounds((10, 99), (10, 8), 10_000, 4 * group) == [0, 4, 8, 10]
    assert segment_bounds((10, 99), (10, 8), 10_000, 1) == list(range(11))
    assert segment_bounds((10, 99), (10, 8), 10_000, 1e9) == [0, 10]
    assert segment_bounds((0, 99), (0, 8), 10_000, 1e9) == [0]
    assert segment_bounds((10, 99), (10, 8), 50, 50 * 4 * 4 * 8 + 5 * 99 * 16) == [0, 5, 10], "rows come once"
    budget = 50 * 4 * 4 * 8 + 5 * 99 * (16 + 4 * 4 * 8)
    assert segment_bounds((10, 99), (10, 8), 50, budget, in_place=False) == [0, 5, 10], "but not their copies"


def test_the_next_segment_comes_while_one_is_scored_and_never_into_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy does not end before the main thread has begun to score the segment before."""
    device = SlowDevice()
    scoring = threading.Semaphore(1)  # nothing is scored while the first segment comes
    finish = device.synchronize

    def late() -> None:
        assert scoring.acquire(timeout=20), "the segment before is not being scored"
        finish()

    def score(*args: Any, **options: Any) -> Tensor:
        scoring.release()
        loss = sampled_softmax(*args, **options)
        device.scored += 1
        return loss

    link = StagedLink(device, "fp32")
    monkeypatch.setattr(device, "synchronize", late)
    monkeypatch.setattr(offload, "sampled_softmax", score)
    inputs = make_inputs(20, 7)
    loss = segmented_softmax(**inputs, budget_bytes=9_000.0, link=link)
    count = len(device.followed)
    assert count > 3
    # Segment i takes the place of segment i - 2, when i - 1 segments have been scored.
    assert device.followed == [max(0, number - 1) for number in range(count)]
    torch.testing.assert_close(loss, sampled_softmax(**inputs))

    monkeypatch.setattr(device, "synchronize", finish)
    device.scored, device.followed = 0, []
    found = gradients(loss, inputs)
    # A gradient is complete when its segment has been scored, and goes back before the place is filled again.
    in_turn = [mark for number in range(count - 1) for mark in (number, number)]
    assert device.followed == [*in_turn, count - 1, count]
    for a, b in zip(found, gradients(sampled_softmax(**inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_accelerator_copies_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = "copies" if not calls else "main"
            calls.append(self.name)

        def __enter__(self) -> None:
            calls.append("enter")

        def __exit__(self, *error: object) -> None:
            calls.append("exit")

        def record_event(self) -> str:
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name} wait for {event}")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(streams, "has_streams", lambda device: True)
    monkeypatch.setattr(streams, "make_current", lambda device: None)
    monkeypatch.setattr(streams.torch, "Stream", Stream)
    monkeypatch.setattr(streams.torch.accelerator, "current_stream", Stream)
    link = link_to(torch.device("meta"), torch.device("cpu"), "fp16")
    assert isinstance(link, StagedLink) and isinstance(link.copies, CopyStream)
    monkeypatch.setattr(link.copies, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    mark = link.mark()
    calls.clear()
    rows = torch.randn(5, 4)
    units, ids = Units(rows, rows.norm(dim=1).reciprocal()), torch.tensor([0, 2, 4])
    buffer = torch.zeros(3, 4)
    link.bring(units, ids, torch.tensor([1]), buffer, mark)
    assert calls == ["copies wait for event of main", "enter", "exit", "enter", "exit", "synchronize"]
    torch.testing.assert_close(buffer, torch.nn.functional.normalize(rows[ids]), rtol=1e-3, atol=1e-3)
    calls.clear()
    total = torch.ones(5, 4)
    link.return_(buffer, ids, total, mark)
    assert calls == ["copies wait for event of main", "enter", "exit", "synchronize"]
    torch.testing.assert_close(total[ids], 1 + buffer)
    assert isinstance(link_to(torch.device("cpu"), torch.device("cpu"), "fp16"), DirectLink)


class BrokenDirect(DirectLink):
    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor, after: Any) -> None:
        raise RuntimeError("the copy failed")


class BrokenStaged(StagedLink):
    def return_(self, gradient: Tensor, ids: Tensor, total: Tensor, after: Any) -> None:
        raise RuntimeError("the copy failed")


@pytest.mark.parametrize("budget", [9_000.0, 1e9])
def test_an_error_of_the_worker_is_raised_and_nothing_hangs(budget: float) -> None:
    for link in (BrokenDirect(), BrokenStaged(SlowDevice(), "fp32")):
        inputs = make_inputs(20, 7)
        loss = segmented_softmax(**inputs, budget_bytes=budget, link=link)
        with pytest.raises(RuntimeError, match="the copy failed"):
            gradients(loss, inputs)
        inputs["positives"] = inputs["positives"] + 1000
        with pytest.raises(ValueError, match="outside"):
            segmented_softmax(**inputs, budget_bytes=budget, link=link)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("turbogr-offload")]
