"""Who computes large products: the fastest that is exact, kept in a file, the same for every process that asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from turbogr import gemm_choice
from turbogr.errors import UserError
from turbogr.gemm_choice import Measurement
from turbogr.ops import projections
from turbogr.ops.projections import PRODUCTS, SIZES, uniform

KEYS = [f"{size} {product}" for size in SIZES for product in PRODUCTS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, tiny products, and no choice in the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(projections.ENVIRONMENT)
    monkeypatch.setattr(gemm_choice, "_WEIGHTS", {"medium": (24, 40), "large": (40, 24)})
    monkeypatch.setattr(gemm_choice, "_PROBE_ROWS", {"medium": 50, "large": 50})
    monkeypatch.setattr(gemm_choice, "_LEAST_ROWS", 32)
    monkeypatch.setattr(gemm_choice, "_ROWS_PER_THREAD", 1)
    monkeypatch.setattr(gemm_choice, "_SECONDS", 0.001)
    monkeypatch.setattr(gemm_choice, "_LEAST_TURNS", 1)
    gemm_choice._operands.cache_clear()
    gemm_choice.unusable.cache_clear()
    return tmp_path / "turbogr"


def rates(**by_provider: float) -> Measurement:
    return Measurement({key: dict(by_provider) for key in KEYS}, {key: {} for key in KEYS})


def test_the_fastest_counts_and_the_library_where_it_is_nearly_as_fast() -> None:
    assert rates(torch=100, onednn=150, turbogr=140).choice() == uniform("onednn")
    assert rates(torch=100, onednn=109, turbogr=90).choice() == uniform("torch")
    assert rates(torch=100, onednn=150, turbogr=140).choice(["torch", "turbogr"]) == uniform("turbogr")


def test_everything_is_measured_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm_choice.kept() is None
    first = gemm_choice.measured()
    assert set(first.rates) == set(KEYS) and all(found["torch"] > 0 for found in first.rates.values())
    monkeypatch.setattr(gemm_choice, "measure", lambda: pytest.fail("measured again"))
    assert gemm_choice.measured() == first == gemm_choice.kept()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{}", "[1]", None])
def test_a_damaged_file_is_measured_again(cache: Path, content: str | None) -> None:
    gemm_choice.measured()
    (path,) = cache.iterdir()
    if content is None:  # of other conditions, under the same name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"conditions": {}}))
    else:
        path.write_text(content)
    assert gemm_choice.kept() is None
    assert gemm_choice.measured() == gemm_choice.kept()


def test_another_number_of_threads_has_a_measurement_of_its_own() -> None:
    before, path = torch.get_num_threads(), gemm_choice._file()
    torch.set_num_threads(before + 1)
    try:
        assert gemm_choice._file() != path
    finally:
        torch.set_num_threads(before)


def test_without_a_folder_for_the_cache_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert gemm_choice.measured().rates and gemm_choice.kept() is None


def patched(monkeypatch: pytest.MonkeyPatch, multiply: object) -> None:
    """Let oneDNN be this function of the factors."""
    found = {**projections._MULTIPLY, "onednn": lambda a, b, start, out: multiply(a, b)}
    monkeypatch.setattr(projections, "_MULTIPLY", found)
    monkeypatch.setattr(projections, "problem", lambda provider: None)


def test_a_provider_that_rounds_to_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lambda a, b: a.bfloat16().float() @ b.bfloat16().float())
    for size in SIZES:
        for product in PRODUCTS:
            assert "its error is" in str(gemm_choice._fault("onednn", size, product))
    assert "its error is" in str(gemm_choice.unusable("onednn"))
    assert gemm_choice.unusable("torch") is None


def test_a_provider_that_depends_on_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lambda a, b: torch.mm(a, b) * (1 + 2e-7 * (torch.get_num_threads() > 1)))
    assert gemm_choice._fault("onednn", "medium", "forward") == "its result depends on the number of threads"


def test_a_provider_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive")

    patched(monkeypatch, failing)
    assert gemm_choice._fault("onednn", "large", "forward") == "it fails: could not create a primitive"
    assert "onednn" not in gemm_choice.measure().rates["large forward"]


def test_the_environment_and_the_config_override_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_choice, "measured", lambda: rates(torch=1, onednn=2, turbogr=3))
    assert gemm_choice.resolve("auto") == uniform("turbogr")
    assert gemm_choice.resolve("auto", ["torch", "onednn"]) == uniform("onednn")
    assert gemm_choice.resolve("onednn") == uniform("onednn")
    monkeypatch.setenv(projections.ENVIRONMENT, "torch")
    assert gemm_choice.resolve("auto") == uniform("torch") and gemm_choice.resolve("turbogr") == uniform("turbogr")
    monkeypatch.setenv(projections.ENVIRONMENT, "mkl")
    with pytest.raises(UserError, match="TURBOGR_GEMM=mkl: unknown 'mkl'"):
        gemm_choice.resolve("auto")
