"""Training in bf16: what is stored, resuming, and where the precision is named."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_run import assert_same_end, final_tensors, stop_after
from turbogr.cli import main
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.device_measurement import products_in
from turbogr.errors import Note
from turbogr.ops import bf16_unit
from turbogr.parallel.consistency import use_same_bf16_unit
from turbogr.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:train.precision=bf16")


@pytest.fixture
def config(config: Config) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2, precision="bf16"))


def test_a_stopped_run_resumes_to_the_same_bits_with_masters_in_fp32(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(Note, match="bf16 stores activations in bf16"):
        train(config, store.path, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        train(config, store.path, tmp_path / "stopped")
    train(config, store.path, tmp_path / "stopped", resume=True)
    assert_same_end(config, store, tmp_path / "straight", tmp_path / "stopped")
    tensors = final_tensors(config, store, tmp_path / "straight")
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.float32}


class Ranks:
    """As many ranks as there are lists of units that work; the first is this process."""

    is_first = True

    def __init__(self, *runnable: list[str]) -> None:
        self.runnable = runnable

    def run_on_all(self, work: Any) -> Any:
        return work()

    def gather_objects(self, own: Any) -> list[Any]:
        return [(units[0], units) for units in self.runnable]


@pytest.mark.parametrize(
    ("runnable", "kept", "expected"),
    [
        ([["amx", "avx512_bf16", "none"]], None, "amx"),
        ([["amx", "avx512_bf16", "none"], ["avx512_bf16", "none"]], None, "avx512_bf16"),
        ([["amx", "none"], ["avx512_bf16", "none"]], None, "none"),
        ([["amx", "avx512_bf16", "none"]], "avx512_bf16", "avx512_bf16"),
        ([["amx", "avx512_bf16", "none"]], "none", "none"),
    ],
)
def test_all_ranks_use_the_unit_of_the_run_or_the_best_common_one(
    runnable: list[list[str]], kept: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    monkeypatch.setattr(bf16_unit, "problem", lambda unit: None)
    monkeypatch.setattr(bf16_unit, "use", used.append)
    assert use_same_bf16_unit(Ranks(*runnable), kept) == expected  # type: ignore[arg-type]
    assert used == [expected]


def test_a_unit_that_is_gone_is_replaced_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_unit, "use", lambda unit: None)
    with pytest.warns(Note, match="the run so far multiplied bf16 by amx"):
        assert use_same_bf16_unit(Ranks(["avx512_bf16", "none"]), "amx") == "avx512_bf16"  # type: ignore[arg-type]


def test_a_resumed_run_keeps_its_unit_and_a_machine_without_one_says_so(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bf16_unit.in_use()
    try:
        bf16_unit.use("none")
        with monkeypatch.context() as patch:
            stop_after(patch, 5)
            with pytest.warns(Note, match="no unit for bf16 works here"):
                train(config, store.path, tmp_path / "run")
        bf16_unit.use(bf16_unit.best())
        train(config, store.path, tmp_path / "run", resume=True)
        assert bf16_unit.in_use() == "none"
        environment = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
        assert environment["machine"]["bf16_unit"] == "none"
    finally:
        bf16_unit.use(before)


def test_evaluate_and_recommend_tell_the_precision(
    config: Config, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=1)), store.path, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "the model computes in bf16" in capsys.readouterr().out
    out = tmp_path / "recommendations.csv"
    assert main(["recommend", str(tmp_path / "run"), "--k", "3", "--out", str(out)]) == 0
    assert "(the model computes in bf16)" in capsys.readouterr().err


def test_tf32_is_for_accelerators_and_on_a_cpu_computes_what_fp32_does(
    config: Config, store: Store, tmp_path: Path
) -> None:
    before = torch.get_float32_matmul_precision()
    short = dataclasses.replace(config.train, epochs=1)
    ends = []
    for precision, expected in (("fp32", None), ("tf32", "tf32 is for accelerators")):
        chosen = dataclasses.replace(config, train=dataclasses.replace(short, precision=precision))
        with pytest.warns(Note, match=expected) if expected else nullcontext():
            train(chosen, store.path, tmp_path / precision)
        ends.append(final_tensors(chosen, store, tmp_path / precision))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert torch.get_float32_matmul_precision() == before == "highest"


@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "highest")])
def test_products_on_a_device_are_in_the_precision_of_the_run(precision: str, products: str) -> None:
    with products_in(precision, torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == products
    with products_in(precision, torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"
