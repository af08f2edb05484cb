"""Measure training steps of one case, in its own process so that its peak memory can be read.

Run as `python -m turbogr.bench._training` with the case as JSON on standard input; the result is JSON on standard
output.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turbogr import gemm_choice, ops
from turbogr.bench._children import failure
from turbogr.config import Config, DataConfig, LossConfig, ModelConfig, TrainConfig, parse, resolve
from turbogr.data.batching import Batch
from turbogr.data.store import Manifest, Store
from turbogr.data.store_writer import StoreWriter
from turbogr.ops import projections
from turbogr.training.operator_times import Profiler
from turbogr.training.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """A model, and batches of `batch_size` sequences with lognormal lengths, from `shortest` to model.max_len."""

    model: dict[str, Any]
    num_items: int
    batch_size: int
    median_length: float
    sigma: float
    shortest: int = 1
    num_negatives: int = 128
    backend: str = "auto"
    precision: str = "fp32"
    threads: int = 0
    seconds: float = 10.0
    min_steps: int = 1
    profile: bool = False
    gemm: str = "auto"


def measure_in_child(case: Case) -> dict[str, Any]:
    """Measure a case in a new process.

    Raises:
        MeasurementFailed: the process failed; the message says why.
    """
    done = subprocess.run(
        [sys.executable, "-m", "turbogr.bench._training"],
        input=json.dumps(dataclasses.asdict(case)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise failure(done.stderr, done.returncode)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def draw_lengths(case: Case, count: int, longest: int, seed: int = 0) -> NDArray[np.int64]:
    """Return `count` lengths of the case's distribution."""
    random = np.random.default_rng(seed)
    lengths = case.median_length * np.exp(case.sigma * random.standard_normal(count))
    return np.clip(lengths, case.shortest, longest).astype(np.int64)


def measure(case: Case) -> dict[str, Any]:
    """Train for about `seconds` and at least `min_steps` steps, after a warm-up step."""
    if case.threads:
        torch.set_num_threads(case.threads)
    ops.set_backend(case.backend)
    projections.use(gemm_choice.resolve(case.gemm))
    ops.keep_freed_memory()
    idle = _resident_bytes("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(case, Path(folder))
        batches = [trainer.loader.batch(0, step) for step in range(trainer.loader.num_batches(0))]
        trainer.step(batches[0])
        trainer.progress.window = type(trainer.progress.window)()
        _reset_peak()
        started = time.perf_counter()
        while trainer.progress.window.steps < case.min_steps or time.perf_counter() - started < case.seconds:
            trainer.step(batches[trainer.progress.step % len(batches)])
        elapsed = time.perf_counter() - started
        window = trainer.progress.window
        result: dict[str, Any] = {
            "tokens_per_second": window.tokens / elapsed,
            "sequences_per_second": window.sequences / elapsed,
            "strict_flops_per_second": window.strict_flops / elapsed,
            "nominal_flops_per_second": window.nominal_flops / elapsed,
            "steps": window.steps,
            "tokens_per_step": window.tokens / window.steps,
            "peak_memory_bytes": _resident_bytes("VmHWM") - idle,
            "num_parameters": trainer.task.num_parameters,
        }
        result["activation_bytes"] = _activation_bytes(trainer, batches[0])
        if case.profile:
            # Average several steps if they are short; a long one varies little.
            count = max(1, min(len(batches), int(2 * window.steps / elapsed)))
            result["profile"] = _profile(trainer, batches[:count])
    return result


def _activation_bytes(trainer: Trainer, batch: Batch) -> int:
    """Bytes that the forward of one step leaves for its backward, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step(batch)
    return sum(kept.values())


def _make_trainer(case: Case, folder: Path) -> Trainer:
    config = Config(
        model=parse(ModelConfig, case.model, "case"),
        loss=LossConfig(num_negatives=case.num_negatives),
        data=DataConfig(batch_size=case.batch_size),
        train=parse(TrainConfig, {"tensorboard": False, "precision": case.precision}, "case"),
    )
    config = resolve(config, num_items=case.num_items, num_sequences=2**20, typical_length=1, longest_length=2**31)
    assert config.model.max_len is not None
    lengths = draw_lengths(case, 8 * case.batch_size, config.model.max_len)
    store = write_store(folder / "store", lengths + 2, case.num_items)
    return Trainer(config, store, folder / "run", device=torch.device("cpu"), peak_flops=None)


def write_store(
    path: Path, lengths: NDArray[np.int64], num_items: int, items: NDArray[np.int64] | None = None
) -> Store:
    """Write a store with random times, and random items unless `items` is given; a step's cost does not depend on
    them."""
    random = np.random.default_rng(1)
    total = int(lengths.sum())
    items = random.integers(0, num_items, total) if items is None else items
    with StoreWriter(path) as writer:
        writer.append("offsets", np.concatenate([[0], np.cumsum(lengths)]), np.int64)
        writer.append("items", items, np.int32)
        writer.append("times", np.cumsum(random.integers(1, 5000, total)), np.int64)
        writer.write_vocabulary("user_ids", np.arange(len(lengths)))
        writer.write_vocabulary("item_ids", np.arange(num_items))
        return writer.commit(
            Manifest(
                source="benchmark",
                num_users=len(lengths),
                num_items=num_items,
                num_events=total,
                split="leave-one-out",
                times="real",
                account={"rows_in": total, "rows_kept": total, "dropped": {}},
            )
        )


def _profile(trainer: Trainer, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the mean milliseconds of a step by operator."""
    profiler = Profiler()
    for batch in batches:
        with profiler:
            trainer.step(batch)
    return profiler.milliseconds()


def _resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process in bytes; 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then includes the set-up


def case_from(raw: Mapping[str, Any]) -> Case:
    return Case(**raw)


if __name__ == "__main__":
    print(json.dumps(measure(case_from(json.load(sys.stdin)))))
