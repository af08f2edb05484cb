"""Table 8 of the paper: quality with 128 drawn negatives, and with 64 that the batch's tokens share to 128."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench._paper_models import paper_model
from turbogr.bench._paper_rows import BATCH_SIZES, Part, Row
from turbogr.bench.record import Cell, Table
from turbogr.config import Config, DataConfig, EvaluateConfig, LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from turbogr.data.prepare.preparation import prepare
from turbogr.training.run import resolve_against
from turbogr.training.trainer import Trainer

_METRICS = ("hr@100", "hr@1000", "ndcg@10", "ndcg@200")
_PAPER = {  # by size, of FuXi: 128 drawn, and 64 shared to 128 (large: to 256, the paper's recommendation)
    "tiny": ((0.0633, 0.2250, 0.0059, 0.0200), (0.0619, 0.2253, 0.0061, 0.0201)),
    "small": ((0.1020, 0.3174, 0.0114, 0.0331), (0.1060, 0.3172, 0.0128, 0.0349)),
    "medium": ((0.1043, 0.3148, 0.0129, 0.0343), (0.1059, 0.3135, 0.0125, 0.0346)),
    "large": ((0.0235, 0.3204, 0.0123, 0.0347), (0.0257, 0.3183, 0.0134, 0.0360)),
}
_EXPANSION = {"tiny": 2, "small": 2, "medium": 2, "large": 4, "long": 4}
# A log with the spread of KuaiRand-27K's lengths whose users are 49.6 % of the longest, small enough for a CPU.
_LOG = {"num_users": 3000, "num_items": 20_000, "median_length": 82.0, "mean_length": 112.0, "max_length": 4000}
_MAX_LEN = 128
_SEEDS = {"tiny": 3, "small": 3}


class Case(NamedTuple):
    """`way`: "baseline" (128 drawn), or how 64 are shared: "batch", "group" or "positions"."""

    size: str
    way: str
    seed: int
    epochs: int
    threads: int


def table8(settings: Mapping[str, Any], part: Part) -> None:
    """Train every size with and without sharing, from several seeds."""
    rows: list[list[Cell]] = []
    ways = ["baseline", "batch"] if settings["quick"] else ["baseline", "batch", "group", "positions"]
    for size in settings["sizes"]:
        epochs = settings["epochs"] or (3 if settings["quick"] else 8)
        found = {}
        for way in ways:
            values = []
            for seed in range(1 if settings["quick"] else _SEEDS.get(size, 1)):
                case = Case(size, way, seed, epochs, torch.get_num_threads())
                values.append(measured(f"{size}, {way}, seed {seed}", partial(in_child, measure, case)))
            found[way] = np.array(values)
            spread = found[way][:, 1].std(ddof=1) if len(values) > 1 else None
            rows.append([size, way, *found[way].mean(axis=0).tolist(), spread])
        paper = _PAPER.get(size, ((None,) * 4,) * 2)
        for column, key, way in ((0, "baseline", "baseline"), (1, "shared", "batch")):
            part.add(
                Row(f"table8_{size}_{key}_hr1000", f"HR@1000 of FuXi {size}, "
                    + ("128 drawn negatives" if key == "baseline" else f"64 shared to {64 * _EXPANSION[size]}"),
                    paper[column][1], "KuaiRand-27K, its 5-core catalogue: another data set, so the levels differ",
                    float(found[way][:, 1].mean()),
                    f"built-in log of {_LOG['num_users']:,} users and {_LOG['num_items']:,} items, {epochs} epochs, "
                    f"{len(found[way])} seed(s), negatives shared among all tokens of the batch", "same", "measured",
                    ("sections=table8", f"sizes={size}"))
            )  # fmt: skip
        for way in ways:
            for number, metric in enumerate(_METRICS):
                part.figures[f"table8_{size}_{way}_{metric.replace('@', '')}"] = float(found[way][:, number].mean())
    columns = ["size", "negatives", *_METRICS, "deviation of HR@1000"]
    part.tables.append(Table("FuXi, quality with shared negatives", columns, rows))


def measure(case: Case) -> list[float]:
    """Train on the built-in log and return the metrics on the validation items."""
    torch.set_num_threads(case.threads)
    name, preset = paper_model(f"fuxi_{case.size}")
    shared = {"num_negatives": 64, "expansion": _EXPANSION[case.size], "sharing": case.way}
    loss = {"num_negatives": 128} if case.way == "baseline" else shared
    with tempfile.TemporaryDirectory() as folder:
        store = prepare("synthetic", [], Path(folder, "store"), **_LOG)  # type: ignore[arg-type]
        config = Config(
            model=ModelConfig(name=name, preset=preset, max_len=_MAX_LEN, dropout=0.5),  # type: ignore[arg-type]
            loss=LossConfig(**loss),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(lr=4e-3, table="adagrad"),
            data=DataConfig(batch_size=2 * BATCH_SIZES[case.size]),
            evaluate=EvaluateConfig(ks=(10, 100, 200, 1000), metric="hr@1000"),
            train=TrainConfig(epochs=case.epochs, seed=case.seed, tensorboard=False),
        )
        config = resolve_against(config, store)
        trainer = Trainer(config, store, Path(folder, "run"), device=torch.device("cpu"), peak_flops=None)
        for epoch in range(case.epochs):
            for step in range(trainer.loader.num_batches(epoch)):
                trainer.step(trainer.loader.batch(epoch, step))
        result = trainer.task.evaluate(trainer.tables.gather_all(), store, trainer.split, trainer.part)
    return [result.metrics[metric] for metric in _METRICS]
