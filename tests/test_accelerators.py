"""Which device a run takes, on machines whose torch was built for more than the machine has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from turbogr import accelerators
from turbogr.errors import UserError
from turbogr.ops import registry


@pytest.fixture
def _wheel_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch answer as its CUDA build does on a machine without a GPU."""

    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)


@pytest.mark.usefixtures("_wheel_for_cuda")
def test_auto_takes_the_cpu_where_torch_was_built_for_a_gpu_that_is_not_there() -> None:
    assert accelerators.choose_device("auto") == torch.device("cpu")
    assert accelerators.choose_device("auto", local_rank=1) == torch.device("cpu")
    with pytest.raises(UserError, match=r"train\.device 'cuda' cannot be used here"):
        accelerators.choose_device("cuda")


def test_a_device_with_a_number_becomes_the_thread_s_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: None)
    for name, rank in (("cuda:3", None), ("cuda:1", 2), ("cuda", 2), ("cpu", 2), ("mps", None)):
        accelerators.choose_device(name, rank)
    assert chosen == [3, 1, 2]


@pytest.fixture
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_warned", set())
    monkeypatch.setattr(registry, "_chosen", {})


def said_on(device: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for operator in ("embed", "hstu_attention", "embed"):
            registry.choose(operator, torch.device(device), torch.float32)
    return [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("_nothing_said")
def test_operators_that_fall_back_to_the_reference_are_named_once_per_kind_of_device() -> None:
    (said,) = said_on("mps")
    assert said.startswith("on mps these operators run as their definition in plain PyTorch")
    assert "embed" in said and "hstu_attention" in said and "no backend is written for mps" in said
    assert "random_integers" in said, "also those that nobody has called yet"
    assert not said_on("mps")
    with registry.backend("reference"):
        assert not said_on("xpu"), "who asks for the reference knows"
    assert not said_on("cpu")


@pytest.mark.usefixtures("_nothing_said")
def test_the_remedy_is_named_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = registry.Backend("triton", problem="it cannot be imported: No module named 'triton'")
    kept = [found for found in registry._operators["embed"] if found.backend.name != "triton"]
    implementations: Any = [registry.Implementation(absent, registry._unavailable), *kept]
    monkeypatch.setitem(registry._operators, "embed", implementations)
    (said,) = said_on("cuda")
    assert "embed (triton: it cannot be imported: No module named 'triton'; install Triton: pip install triton" in said
    (said,) = said_on("mps")
    assert "pip install" not in said, "Triton does not know mps"
