"""`turbogr bench kernels`: a few variants really compiled, and what the figures say of good and bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turbogr.bench import _ascend, kernels, run_benchmark
from turbogr.bench._compile_kernels import TARGETS
from turbogr.errors import UserError
from turbogr.ops import triton_runtime
from turbogr.ops.triton_kernels.variants import list_variants

needs_triton = pytest.mark.skipif(
    triton_runtime.BACKEND.problem is not None, reason=str(triton_runtime.BACKEND.problem)
)

FEW = ["kernels=attention_forward", "heads=16", "precisions=bf16", "ascend=false"]


@needs_triton
def test_kernels_compile_for_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    select = kernels._select
    monkeypatch.setattr(
        kernels, "_select", lambda *args: [v for v in select(*args) if v.name.endswith("causal_nobias")]
    )
    settings = [*FEW, "targets=sm90,gfx942"]
    figures = run_benchmark("kernels", settings)[0].figures
    assert figures == {
        "kernels": 1,
        "targets": 2,
        "compiled": 2,
        "spills": 0,
        "over_shared_memory": 0,
        "without_matrix_units": 0,
    }
    monkeypatch.setattr(kernels, "in_child", lambda function, job: function(job))
    monkeypatch.setattr("turbogr.bench._compile_kernels._compile", None)  # what is kept is not compiled again
    assert run_benchmark("kernels", settings)[0].figures == figures


def test_figures_count_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_variants(function: Any, job: tuple[str, list[Any]]) -> list[dict[str, Any]]:
        facts = [
            {
                "variant": v.name,
                "target": job[0],
                "registers": 255,
                "spills": 0,
                "shared": 1024,
                "matrix": 8,
                "special": 0,
            }
            for v in job[1]
        ]
        facts[0] |= {"spills": 8}
        facts[1] |= {"shared": TARGETS[job[0]].shared_limit + 1}
        facts[2] |= {"matrix": 0}
        facts[3] = {"variant": facts[3]["variant"], "target": job[0], "error": "CompilationError: no"}
        return facts

    monkeypatch.setattr(kernels, "in_child", compile_variants)
    monkeypatch.setattr(triton_runtime, "BACKEND", triton_runtime.TritonBackend("triton"))
    record, result = run_benchmark("kernels", [*FEW, "heads=64", "targets=sm80"])
    figures = record.figures
    assert (figures["kernels"], figures["compiled"]) == (6, 5)
    assert (figures["spills"], figures["over_shared_memory"], figures["without_matrix_units"]) == (1, 1, 1)
    assert any("CompilationError: no" in note for note in result.notes)


@pytest.mark.parametrize(
    ("setting", "message"), [("targets=sm91", "Did you mean 'sm90'"), ("kernels=attention", "choose from all, ")]
)
def test_unknown_names_are_refused(setting: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "BACKEND", triton_runtime.TritonBackend("triton"))
    with pytest.raises(UserError, match=message):
        run_benchmark("kernels", [setting])


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = triton_runtime.TritonBackend("triton", problem="Triton is not installed; install it")
    monkeypatch.setattr(triton_runtime, "BACKEND", backend)
    with pytest.raises(UserError, match="install it"):
        run_benchmark("kernels", [])


def test_without_the_environment_for_ascend_the_reason_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_ascend, "PACKAGES", (str(tmp_path / "no-such.whl"),))
    lowered, notes = _ascend.lower_for_ascend([])
    assert lowered is None and "could not be installed" in notes[0]


@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_every_variant_has_a_name_of_its_own_and_attention_a_large_tile(device: str) -> None:
    variants = list_variants(device)
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        if variant.module not in ("attention", "channels", "relative_weights"):
            continue
        sides = sorted((variant.tile.block_q, variant.tile.block_k))
        assert sides[0] >= 32 and sides[1] >= 64, variant.name
