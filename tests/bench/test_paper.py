from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turbogr.bench import _paper_attention, _paper_memory, _paper_parts, _paper_simulator, _paper_steps, paper
from turbogr.bench._children import in_child
from turbogr.bench._paper_attention import padded_fuxi_attention
from turbogr.bench._paper_device_rank import simulated_device
from turbogr.bench._paper_rows import Part, Row, filled_lengths
from turbogr.bench._ranks import run_as_ranks
from turbogr.bench._steps import make_stepper
from turbogr.bench.record import Record
from turbogr.cli import main
from turbogr.errors import UserError
from turbogr.ops import DecayBias, fuxi_attention, sampled_softmax
from turbogr.parallel.mesh import Mesh
from turbogr.parallel.world import World
from turbogr.training.cost_measurement import made_up_batch


def row(**changes: Any) -> Row:
    values = {"key": "table9_x", "claim": "x", "paper": 2.0, "paper_conditions": "", "ours": 3.0, "conditions": "",
              "better": "higher", "kind": "measured"}  # fmt: skip
    return Row(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reached"),
        ({"better": "lower"}, "falls short"),
        ({"ours": 1.0}, "falls short"),
        ({"ours": 2.0, "better": "lower"}, "reached"),
        ({"paper": None}, "no figure in the paper"),
        ({"better": "same"}, "compared"),
    ],
)
def test_a_row_says_whether_the_paper_is_reached(changes: dict[str, Any], verdict: str) -> None:
    assert row(**changes).verdict == verdict
    assert row(**changes).ratio == (None if row(**changes).paper is None else row(**changes).ours / 2.0)


@pytest.mark.parametrize("longest", [512, 2048, 8192])
def test_lengths_are_as_full_as_the_papers(longest: int) -> None:
    lengths = filled_lengths(20_000, longest)
    assert lengths.mean() / longest == pytest.approx(0.496, abs=0.002)
    assert lengths.max() == longest and lengths.min() >= 2
    assert 1 < filled_lengths(2, longest).mean() < longest


def test_planned_steps_wait_less_than_the_paper_with_two_sequences_per_rank() -> None:
    cost = _paper_parts.counted_cost(_paper_parts.ModelConfig(preset="long"), 128)
    found = _paper_parts.waiting_by_plan(filled_lengths(16 * 2 * 64, 8192), 2, cost)
    assert found["after"] < 2.4 < found["shared"] < found["before"]
    assert found["varies_after"] < found["varies"]


def test_the_simulator_predicts_a_preset_from_the_others() -> None:
    steps = _paper_simulator.paper_steps()
    device = _paper_simulator.Device(1.0, 1.5)
    pretended = {name: _paper_simulator.scalability(step, device) for name, step in steps.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_paper_simulator, "SCALABILITY", pretended)
        found = _paper_simulator.fit([name for name in steps if name != "fuxi_small"], steps)
    assert found == pytest.approx(device, rel=1e-3), "constants that made the figures are found again"
    assert set(_paper_steps.SCALABILITY) == set(_paper_steps.MFU) == set(_paper_steps.SAMPLES) == set(steps)


def test_padded_attention_computes_what_the_fused_operator_does() -> None:
    torch.manual_seed(0)
    lengths, max_len = torch.tensor([5, 1, 8]), 8
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    q, k, v = (torch.randn(14, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    times = torch.randint(0, 10**6, (14,)).sort()[0]
    weights = torch.randn(2 * max_len - 1, dtype=torch.float64).requires_grad_()
    decay = torch.tensor([0.5, 0.3, 0.8], dtype=torch.float64).requires_grad_()
    bias = DecayBias(times + 5, times, weights, decay)
    inputs = [q, k, v, weights, decay]
    results = []
    for attend in (fuxi_attention, padded_fuxi_attention):
        out = attend(q, k, v, offsets, bias, max_len=max_len)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours)


def test_the_gathered_loss_is_the_sampled_softmax() -> None:
    torch.manual_seed(0)
    outputs, rows = torch.randn(6, 8).requires_grad_(), torch.randn(10, 8).requires_grad_()
    positives = torch.randint(0, 10, (6,), dtype=torch.int32)
    negatives = torch.randint(0, 10, (6, 5), dtype=torch.int32)
    ours = sampled_softmax(outputs, rows, positives, negatives, temperature=0.05)
    gathered = _paper_memory._gathered(outputs, rows, positives, negatives)
    torch.testing.assert_close(gathered, ours, rtol=1e-4, atol=1e-4)
    known = torch.autograd.grad(ours.sum(), [outputs, rows])
    given = _paper_memory._with_gradients(outputs, rows, ours.detach(), *known)
    expected = torch.autograd.grad(gathered.mean(), [outputs, rows])
    for found, wanted in zip(torch.autograd.grad(given.mean(), [outputs, rows]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_simulated_device_takes_its_time_and_gives_zero_gradients() -> None:
    options = {"model": "hstu", "preset": "tiny", "num_items": 50, "num_negatives": 4}
    stepper = make_stepper(options, Mesh(World()))
    batch = stepper.prepare(made_up_batch(np.array([3, 5]), 50), 0)
    sets = stepper.fetch(batch)
    before = [parameter.detach().clone() for parameter in stepper.model.parameters()]
    simulated_device(stepper, 0.05)(batch, sets, 0)
    stepper.update(stepper.reduce(sets), 1.0, 1.0)
    for parameter, old in zip(stepper.model.parameters(), before, strict=True):
        assert parameter.grad is None or not parameter.grad.any()
        torch.testing.assert_close(parameter, old)


@pytest.fixture
def quick_sections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two sections that take no time, and a list of which were measured."""
    asked: list[str] = []

    def section(name: str) -> Any:
        def measure(settings: Any, part: Part) -> None:
            value = paper._journal.measured("case", lambda: asked.append(name) or float(len(name)))
            part.add(row(key=f"{name}_x", claim=f"<{name}>", ours=value, settings=(f"sections={name}",)))

        return measure

    sections = {name: section(name) for name in ("table1", "simulator")}
    monkeypatch.setattr(paper, "SECTIONS", sections)
    monkeypatch.setitem(paper.SETTINGS, "sections", list(sections))
    return asked


def test_the_folder_has_a_record_of_each_section_and_of_all(
    quick_sections: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "paper", "--quick", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.html", "paper.json", "simulator.json", "table1.json",
    ]  # fmt: skip
    for path in (tmp_path / "out").glob("*.json"):
        assert json.loads(path.read_text())["figures"]
    whole = Record.read(tmp_path / "out" / "paper.json")
    assert whole.figures == {"table1_x": 6.0, "simulator_x": 9.0}
    assert [found["key"] for found in whole.rows] == ["table1_x", "simulator_x"]
    first = whole.rows[0]
    assert first["ratio"] == 3.0 and first["verdict"] == "reached" and first["machine"]
    assert "--quick" in first["command"] and "--set sections=table1" in first["command"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;table1&gt;" in page and "<table1>" not in page
    assert Balance().unclosed(page) == []
    assert "1 of 2" in capsys.readouterr().err


def test_a_section_that_is_repeated_keeps_the_rows_of_the_others(quick_sections: list[str], tmp_path: Path) -> None:
    assert main(["bench", "paper", "--out", str(tmp_path)]) == 0
    assert main(["bench", "paper", "--out", str(tmp_path), "--set", "sections=simulator"]) == 0
    assert quick_sections == ["table1", "simulator", "simulator"]
    whole = Record.read(tmp_path / "paper.json")
    assert whole.figures == {"table1_x": 6.0, "simulator_x": 9.0}
    assert [found["key"] for found in whole.rows] == ["table1_x", "simulator_x"]


def test_an_interrupted_comparison_goes_on(
    quick_sections: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "paper", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:

        def stop(settings: Any, part: Part) -> None:
            raise KeyboardInterrupt

        patch.setitem(paper.SECTIONS, "simulator", stop)
        assert main(command) != 0
    assert quick_sections == ["table1"]
    assert json.loads((tmp_path / "paper.json").read_text())["figures"] == {"table1_x": 6.0}, "what is done is there"
    assert main(command) == 0
    assert quick_sections == ["table1", "simulator"], "nothing is measured twice"
    assert "1 cases are taken" in capsys.readouterr().err
    assert not (tmp_path / "unfinished").exists()


def test_a_section_that_fails_is_named_and_the_others_go_on(
    quick_sections: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: Any, part: Part) -> None:
        def work() -> None:
            raise paper._journal.MeasurementFailed("no memory")

        paper._journal.measured("the case", work)

    monkeypatch.setitem(paper.SECTIONS, "table1", fail)
    assert main(["bench", "paper", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "table1: the case could not be measured: no memory" in printed.out + printed.err
    assert Record.read(tmp_path / "paper.json").figures == {"simulator_x": 9.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["paper", "--set", "sections=table9"], "table8"),
        (["paper", "--set", "presets=hstu_tin"], "hstu_tiny"),
        (["paper", "--json", "x.json"], "--out"),
        (["gemm", "--quick"], "paper"),
        (["gemm", "--out", "x"], "--json"),
    ],
)
def test_wrong_use_is_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_settings_that_are_given_win_over_quick() -> None:
    quick = paper.quick_settings({**paper.SETTINGS, "quick": True, "presets": ["hstu_small"]})
    assert quick["presets"] == ["hstu_small"] and quick["sizes"] == ["tiny"]
    assert paper.quick_settings(paper.SETTINGS) == paper.SETTINGS


def test_unknown_names_are_refused_before_measuring() -> None:
    with pytest.raises(UserError, match="medium"):
        next(paper.measure_sections({**paper.SETTINGS, "sizes": ["mediun"]}))


class Balance(HTMLParser):
    """Which tags are left open."""

    def unclosed(self, page: str) -> list[str]:
        self.open: list[str] = []
        self.feed(page)
        return self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_whole_steps_are_measured_with_padded_attention_and_with_ours() -> None:
    for padded in (True, False):
        case = _paper_attention.Case(padded, 64, 1, 2, 1, "fuxi_tiny")
        seconds, peak = in_child(_paper_attention.measure, case)
        assert seconds > 0 and peak > 2**20


def test_the_memory_of_a_step_is_measured_in_every_way() -> None:
    for way in ("gathered", "segments"):
        seconds, peak = in_child(_paper_memory.measure, _paper_memory.Case(way, 2, "fuxi_tiny", 1))
        assert seconds > 0 and peak > 2**20


def test_a_job_with_a_simulated_device_takes_at_least_the_devices_time() -> None:
    options = {"model": "hstu", "preset": "tiny", "lengths": [12], "num_items": 200, "num_negatives": 4, "steps": 2}
    rank = "turbogr.bench._paper_device_rank"
    assert run_as_ranks(rank, 1, {**options, "seconds": None})["seconds"] > 0
    for mode in ("serial", "exact_overlap"):
        assert run_as_ranks(rank, 2, {**options, "seconds": 0.03, "mode": mode})["seconds"] > 0.03


def test_both_meshes_are_timed_and_one_is_chosen() -> None:
    options = {"num_items": 300, "model": "hstu", "preset": "tiny", "dim": 32, "lengths": [16], "num_negatives": 4}
    found = run_as_ranks("turbogr.bench._paper_mesh_rank", 4, {**options, "steps": 2, "nodes": 2})
    assert len(found["flat"]) == len(found["hierarchical"]) == 2 and min(found["predicted"]) > 0
    assert found["groups"] == (1 if found["predicted"][0] <= found["predicted"][1] else 2)
