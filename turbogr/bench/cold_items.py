"""Recommending items without a single training event, by their features: hit rate among all items.

Claim: with features of items, a cold item is found at least five times as often as by chance.
Compared with: chance, the model without features, and items that were in training.
Keys: `cold_hr@50` and `warm_hr@50` of users whose next item is cold or warm; `chance_hr@50`; `cold_over_chance`;
`plain_cold_hr@50` without features; `num_cold_users`, `num_cold_items`.

A share of the items of a log is drawn, and their records before the cut in time are left out, so that training has none
of them. The model is trained on the rest, and every user's first item after the cut is ranked among all items.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from turbogr.bench._journal import measured
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import load_config
from turbogr.data.prepare import preparation
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation.evaluator import evaluate
from turbogr.evaluation.held_out import HeldOut
from turbogr.runs import open_run
from turbogr.tasks.retrieval import RetrievalTask
from turbogr.training.run import train

SETTINGS: dict[str, Any] = {
    "log": "",  # a CSV file
    "source": "csv",
    "item_column": "item_id",
    "time_column": "timestamp",
    "time_unit": 1,  # of the time column in a second; 1000 for milliseconds
    "item_features": "",  # a table of items
    "split": "",  # time:VALIDATION,TEST in seconds
    "recipe": "quickstart",
    "epochs": 10,
    "share": 0.1,
    "seed": 0,
}

_K = 50


def run(settings: Mapping[str, Any]) -> Result:
    """Hold items out, train, and measure both kinds."""
    for name in ("log", "item_features", "split"):
        if not settings[name]:
            raise UserError(f"bench cold_items needs {name}; give it with --set {name}=...")
    figures: dict[str, float] = measured("cold items", lambda: _measure(settings))
    rows: list[list[Cell]] = [[name, value] for name, value in figures.items()]
    return Result(figures, [Table("Items without a training event", ["figure", "value"], rows)])


def _measure(settings: Mapping[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        num_cold = write_log(settings, log)
        options = {"item_features": settings["item_features"], "split": settings["split"]}
        options |= {"min_user_events": 1, "min_item_events": 1}
        preparation.prepare(settings["source"], [log], Path(folder, "store"), **options)
        store = Store.open(Path(folder, "store"))
        overrides = [
            f"train.epochs={settings['epochs']}",
            "evaluate.baselines=[]",
            "deliver.choose=model",
            "data.cold_items=true",
        ]
        config = load_config(settings["recipe"], [*overrides, f"train.seed={settings['seed']}"])
        train(config, store.path, Path(folder, "run"))
        return {"num_cold_items": float(num_cold), **hit_rates(Path(folder, "run"))}


def write_log(settings: Mapping[str, Any], out: Path) -> int:
    """Write the log without the held-out items' records before the validation part; return how many items these are."""
    cut = float(str(settings["split"]).removeprefix("time:").split(",")[0]) * settings["time_unit"]
    log = pl.read_csv(settings["log"], infer_schema_length=10_000)
    items = log[settings["item_column"]].unique().sort()
    drawn = np.random.default_rng(settings["seed"]).random(len(items)) < settings["share"]
    cold = items.filter(pl.Series(drawn))
    kept = ~(pl.col(settings["item_column"]).is_in(cold.implode()) & (pl.col(settings["time_column"]) < cut))
    log.filter(kept).write_csv(out)
    return len(cold)


def hit_rates(run: Path) -> dict[str, float]:
    """Return the hit rates of a run on the test part, for cold and warm items, and by chance."""
    opened = open_run(run, device="cpu")
    task, store, split = opened.task, opened.store, Split.of(opened.store)
    assert isinstance(task, RetrievalTask)
    held_out = HeldOut.of(store, split, "test")
    is_cold = store.item_counts(split.train_end)[held_out.targets] == 0
    if is_cold.all() or not is_cold.any():
        raise UserError("the test part has no cold item, or no other; hold out another share with --set share=...")
    by_features = evaluate(task.own_scorer(opened.tables, store, split), store, split, "test", filter_seen=False)
    plain = evaluate(task.scorer(opened.tables), store, split, "test", filter_seen=False)
    hits, plain_hits = by_features.positions <= _K, plain.positions <= _K
    chance = _K / store.num_items
    return {
        f"cold_hr@{_K}": float(hits[is_cold].mean()),
        f"warm_hr@{_K}": float(hits[~is_cold].mean()),
        f"chance_hr@{_K}": chance,
        "cold_over_chance": float(hits[is_cold].mean()) / chance,
        f"plain_cold_hr@{_K}": float(plain_hits[is_cold].mean()),
        f"plain_warm_hr@{_K}": float(plain_hits[~is_cold].mean()),
        "num_cold_users": float(is_cold.sum()),
        "num_warm_users": float((~is_cold).sum()),
    }
