"""Does learning change if a batch is a number of tokens instead of a number of sequences?

Reallocation does not change a global batch, so it cannot change the result. Batches of tokens do: a batch has fewer
sequences when they are long. This trains on the built-in log both ways, with the same mean number of tokens per batch,
from several seeds, and measures how lengths correlate within batches.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from turbogr.bench._journal import measured
from turbogr.bench.record import Cell, Table
from turbogr.config import Config, DataConfig, EvaluateConfig, ModelConfig, OptimizerConfig, TrainConfig
from turbogr.data.batching import plan_batches
from turbogr.data.prepare.preparation import prepare
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.plot import Axis, Series, line_chart
from turbogr.training.run import resolve_against
from turbogr.training.trainer import Trainer

_SEEDS = (0, 1, 2)
_METRIC = "ndcg@10"


class Curves(NamedTuple):
    """The result of `learning_curves`."""

    figures: dict[str, float]
    table: Table
    plot: str


def learning_curves(epochs: int, **synthetic: Any) -> Curves:
    """Train `epochs` epochs on the built-in log with both kinds of batches; `synthetic` changes the log."""
    with tempfile.TemporaryDirectory() as folder:
        store = prepare("synthetic", [], Path(folder, "store"), **synthetic)
        by_sequences = resolve_against(_config(epochs), store)
        lengths = _trainer(by_sequences, store, Path(folder)).loader.sequences.lengths
        assert by_sequences.data.batch_size is not None
        batch_tokens = round(by_sequences.data.batch_size * float(lengths.mean()))
        by_tokens = dataclasses.replace(by_sequences, data=DataConfig(batch_tokens=batch_tokens))
        figures: dict[str, float] = {}
        rows: list[list[Cell]] = []
        curves: list[Series] = []
        for name, config in (("sequences", by_sequences), ("tokens", by_tokens)):
            values = np.array(
                [
                    measured(f"batches of {name}, seed {seed}", partial(_curve, config, store, Path(folder), seed))
                    for seed in _SEEDS
                ]
            )
            data = config.data
            batches = plan_batches(lengths, batch_size=data.batch_size, batch_tokens=data.batch_tokens)
            mixing = length_correlation(lengths, batches)
            figures[f"learning_{name}_ndcg10"] = float(values[:, -1].mean())
            figures[f"learning_{name}_length_correlation"] = mixing
            rows.append([f"batches of {name}", float(values[:, -1].mean()), float(values[:, -1].std(ddof=1)), mixing])
            mean, low, high = (values.mean(axis=0), values.min(axis=0), values.max(axis=0))
            done = list(range(1, epochs + 1))
            curves.append(Series(f"batches of {name}", done, mean.tolist(), low.tolist(), high.tolist()))
    columns = ["batches", f"valid {_METRIC}", "deviation over seeds", "correlation of lengths within a batch"]
    plot = line_chart(
        curves,
        title="Learning with batches of sequences and of tokens",
        x=Axis("epochs", integer=True),
        y=Axis(f"valid {_METRIC}, mean and range of {len(_SEEDS)} seeds"),
    )
    return Curves(figures, Table(f"Learning on the built-in log, {epochs} epochs", columns, rows), plot)


def length_correlation(lengths: Int64Array, batches: list[Int64Array]) -> float:
    """Return the correlation of a sequence's length with the mean length of the others in its batch, −1 to 1.

    Batches drawn independently of length give about 0, batches of equal lengths 1.
    """
    own, others = [], []
    for batch in batches:
        if len(batch) > 1:
            here = lengths[batch].astype(np.float64)
            own.append(here)
            others.append((here.sum() - here) / (len(here) - 1))
    x, y = np.concatenate(own), np.concatenate(others)
    return 0.0 if x.std() == 0 or y.std() == 0 else float(np.corrcoef(x, y)[0, 1])


def _config(epochs: int) -> Config:
    """Return the quick start's model with a constant learning rate: a schedule would depend on the number of steps."""
    return Config(
        model=ModelConfig(num_blocks=2, num_heads=2, dropout=0.2),
        optimizer=OptimizerConfig(lr=2e-3),
        evaluate=EvaluateConfig(ks=(10,), metric=_METRIC),
        train=TrainConfig(epochs=epochs, tensorboard=False),
    )


def _trainer(config: Config, store: Store, folder: Path) -> Trainer:
    return Trainer(config, store, folder / "run", device=torch.device("cpu"), peak_flops=None)


def _curve(config: Config, store: Store, folder: Path, seed: int) -> list[float]:
    """Return the metric after every epoch."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    trainer = _trainer(config, store, folder)
    values = []
    for epoch in range(config.train.epochs or 0):
        for step in range(trainer.loader.num_batches(epoch)):
            trainer.step(trainer.loader.batch(epoch, step))
        result = trainer.task.evaluate(trainer.tables.gather_all(), store, trainer.split, trainer.part)
        values.append(result.metrics[_METRIC])
    return values
