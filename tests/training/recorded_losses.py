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

import torch

from tests.training.conftest import make_config, write_store
from turbogr import ops
from turbogr.config import Config
from turbogr.data.store import Store
from turbogr.ops import native
from turbogr.training.run import resolve_against
from turbogr.training.trainer import Trainer

RECORDED = Path(__file__).with_name("recorded_losses.json")
NUM_STEPS = 12
PRECISIONS = ("fp32", "fp16", "int8")
MODELS = ("hstu", "sasrec")
CASES = [*((model, "fp32") for model in MODELS), *(("hstu", precision) for precision in PRECISIONS[1:])]
"""Models, and precisions of the negatives' vectors."""


def ways() -> list[str]:
    """Return how this machine can compute: by the reference, or by the kernels for an instruction set."""
    return ["reference", *(f"cpu {isa}" for isa in native.available_isas())]


@contextmanager
def computing(way: str) -> Iterator[None]:
    """Compute in one of these `ways` inside the block."""
    backend, _, isa = way.partition(" ")
    before = native.isa()
    try:
        ops.set_backend("reference" if backend == "reference" else "auto")
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
        while len(found) < NUM_STEPS:
            for batch in trainer.loader:
                before = trainer.progress.window.loss_sum
                trainer.step(batch)
                found.append((trainer.progress.window.loss_sum - before) / batch.num_trained_of_step)
    return found[:NUM_STEPS]


def _config(model: str, precision: str) -> Config:
    config = make_config()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name=model),
        loss=dataclasses.replace(config.loss, precision=precision),
        optimizer=dataclasses.replace(config.optimizer, lr=1e-3),
    )


def main() -> None:
    recorded: dict[str, dict[str, list[float]]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for model, precision in CASES:
            curves = recorded.setdefault(f"{model} {precision}", {})
            curves.update({way: losses(model, precision, way, Path(folder)) for way in ways()})
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
