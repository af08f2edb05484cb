"""Who computes large products is chosen at the start of a run, stored with it, kept on resuming, equal on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turbogr import gemm_choice
from turbogr.config import Config, load_run_config
from turbogr.data.store import Store
from turbogr.errors import Note, UserError
from turbogr.ops import native, projections
from turbogr.ops.projections import uniform
from turbogr.parallel.consistency import use_same_products
from turbogr.runs import open_run, use_products_of
from turbogr.training.run import train

needs_kernels = pytest.mark.skipif(native.BACKEND.problem is not None, reason="the kernels are not built")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    cached = gemm_choice.unusable
    cached.cache_clear()
    with projections.using(uniform("torch")):
        yield
    cached.cache_clear()


def choosing(config: Config, gemm: str, **train_settings: Any) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, gemm=gemm, **train_settings))


@needs_kernels
def test_a_run_keeps_its_choice(config: Config, store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(choosing(config, "turbogr", epochs=1), store.path, run)
    assert load_run_config(run).train.gemm == "turbogr" and projections.in_use() == uniform("turbogr")
    projections.use(uniform("torch"))
    train(choosing(config, "auto", epochs=2), store.path, run, resume=True)
    assert load_run_config(run).train.gemm == "turbogr" and projections.in_use() == uniform("turbogr")
    projections.use(uniform("torch"))
    open_run(run)
    assert projections.in_use() == uniform("turbogr")


def test_a_small_model_needs_no_choice(
    config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_choice, "resolve", lambda *args: pytest.fail("measured for nothing"))
    train(choosing(config, "auto", epochs=1), store.path, tmp_path / "run")
    assert load_run_config(tmp_path / "run").train.gemm == "auto"


def test_a_misspelt_provider_is_refused_before_a_folder_is_made(config: Config, store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.gemm=onednm: unknown 'onednm'.*onednn"):
        train(choosing(config, "onednm"), store.path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_whose_provider_is_missing_is_measured_by_the_library_and_says_so(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "problem", lambda name: "it is not built" if name == "turbogr" else None)
    with pytest.warns(Note, match=r"cannot compute .* by turbogr \(it is not built\); PyTorch's library computes them"):
        use_products_of(choosing(config, "turbogr"))
    assert projections.in_use() == uniform("torch")


class TwoRanks:
    """What rank 0 of two sees, where the other one refuses some providers."""

    size, is_first = 2, True

    def __init__(self, refused: dict[str, str]) -> None:
        self.refused = refused

    def run_on_all(self, work: Callable[[], Any]) -> Any:
        return work()

    run_on_first = run_on_all

    def gather_objects(self, value: Any) -> list[Any]:
        other = {name: self.refused.get(name) for name in projections.PROVIDERS} if isinstance(value, dict) else value
        return [value, other]


def test_ranks_use_what_rank_0_has_measured_among_what_all_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(projections.ENVIRONMENT)
    monkeypatch.setattr(gemm_choice, "unusable", lambda name: None)
    rates = {f"{size} {product}": {"torch": 1.0, "onednn": 3.0} for size, product in uniform("torch")}
    rates["large weight_gradient"]["turbogr"] = 4.0
    monkeypatch.setattr(gemm_choice, "measured", lambda: gemm_choice.Measurement(rates, {}))
    mixed = "medium=onednn/onednn/onednn,large=onednn/onednn/turbogr"
    assert use_same_products(TwoRanks({}), "auto") == mixed  # type: ignore[arg-type]
    assert projections.write_choice(projections.in_use()) == mixed
    assert use_same_products(TwoRanks({"onednn": "its error is 2e-3"}), "auto") == (  # type: ignore[arg-type]
        "medium=torch/torch/torch,large=torch/torch/turbogr"
    )
    with pytest.raises(UserError, match="'onednn' cannot compute products on the machine of rank 1: its error is 2e-3"):
        use_same_products(TwoRanks({"onednn": "its error is 2e-3"}), "onednn")  # type: ignore[arg-type]
