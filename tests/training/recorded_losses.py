"""Loss curves of a few steps by backend, instruction set and precision; run as a program, it records them again:

    python -m tests.training.recorded_losses

Do that only after a change that is meant to change numbers, and say so in the commit.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import make_config, write_store
from turbogr import ops
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.ops import bf16_unit, native, triton_runtime
from turbogr.training.run import resolve_against
from turbogr.training.trainer import Trainer

RECORDED = Path(__file__).with_name("recorded_losses.json")
NUM_STEPS = 12
MODELS = ("hstu", "sasrec")
CASES = [
    *((model, precision) for precision in ("fp32", "bf16") for model in MODELS),
    *(("hstu", precision) for precision in ("fp16", "int8", "interpreted")),
]
"""Models, and precisions: that of training, or where it is fp32 that of the negatives' vectors. `interpreted` is fp32
on a few short sequences, which Triton's interpreter computes in seconds."""
_FEW_STEPS = 2


def ways(precision: str = "fp32") -> list[str]:
    """Return how this machine can compute: by the reference, by the kernels for an instruction set, or by Triton's."""
    interpreted = precision == "interpreted" and triton_runtime.BACKEND.problem is None
    return ["reference", *(f"cpu {isa}" for isa in native.available_isas()), *(["triton"] if interpreted else [])]


@contextmanager
def computing(way: str) -> Iterator[None]:
    """Compute in one of these `ways` inside the block, products of bf16 numbers in fp32 as every processor can."""
    backend, _, isa = way.partition(" ")
    before = native.isa()
    with bf16_unit.using("none"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            ops.set_backend("auto" if backend == "cpu" else backend)
            native.set_isa(isa or before)
            yield
        finally:
            ops.set_backend("auto")
            native.set_isa(before)


def losses(model: str, precision: str, way: str, folder: Path) -> list[float]:
    """Train some steps on a small store and return the loss of each."""
    config = _config(model, precision)
    path = folder / "store"
    store = Store.open(path) if path.exists() else write_store(path)
    with computing(way):
        trainer = Trainer(
            resolve_against(config, store), store, folder / "run", device=torch.device("cpu"), peak_flops=None
        )
        found: list[float] = []
        num_steps = _FEW_STEPS if precision == "interpreted" else NUM_STEPS
        while len(found) < num_steps:
            for batch in trainer.loader:
                before = trainer.progress.window.loss_sum
                trainer.step(batch)
                found.append((trainer.progress.window.loss_sum - before) / batch.num_trained_of_step)
    return found[:num_steps]


def _config(model: str, precision: str) -> Config:
    config = make_config()
    changes: dict[str, Any] = {"optimizer": dataclasses.replace(config.optimizer, lr=1e-3)}
    if precision == "interpreted":
        changes["data"] = dataclasses.replace(config.data, batch_size=2)
    elif precision == "bf16":
        changes["train"] = dataclasses.replace(config.train, precision=precision)
    else:
        changes["loss"] = dataclasses.replace(config.loss, precision=precision)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, name=model), **changes)


def main() -> None:
    recorded: dict[str, dict[str, list[float]]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for model, precision in CASES:
            curves = recorded.setdefault(f"{model} {precision}", {})
            curves.update({way: losses(model, precision, way, Path(folder)) for way in ways(precision)})
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
