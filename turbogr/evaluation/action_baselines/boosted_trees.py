"""Gradient boosted trees by LightGBM, an optional package, on counts, rates, numbers and small categories."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turbogr.data.vocabulary import Int64Array

Floats = NDArray[np.float64]

NOT_INSTALLED = "LightGBM is not installed: pip install lightgbm, or pip install 'turbogr[baselines]'"

_MOST_ROUNDS = 600
_PATIENCE = 25
_BINS = 127
_ROWS_FOR_THREADS = 50_000


def is_installed() -> bool:
    """Return whether the package is there."""
    return importlib.util.find_spec("lightgbm") is not None


def draw_settings(num_trials: int, seed: int) -> list[dict[str, Any]]:
    """Return the settings of `num_trials` trials: LightGBM's own defaults first, the others drawn."""
    rng = np.random.default_rng(seed)
    drawn: list[dict[str, Any]] = [{"num_leaves": 31, "learning_rate": 0.1, "min_data_in_leaf": 20}]
    while len(drawn) < num_trials:
        drawn.append(
            {
                "num_leaves": int(2 ** rng.uniform(2.5, 6.5)),
                "learning_rate": float(np.exp(rng.uniform(np.log(0.03), np.log(0.25)))),
                "min_data_in_leaf": int(10 ** rng.uniform(1, 3)),
                "feature_fraction": float(rng.uniform(0.2, 1)),
                "bagging_fraction": float(rng.uniform(0.4, 1)),
                "bagging_freq": 1,
                "lambda_l1": float(10 ** rng.uniform(-3, 1)),
                "lambda_l2": float(10 ** rng.uniform(-3, 2)),
                "cat_smooth": float(10 ** rng.uniform(0, 2.5)),
                "path_smooth": float(rng.choice([0, 1, 10, 100])),
            }
        )
    return drawn[:num_trials]


class BoostedTrees:
    """Trees for one task, on rows [E, C] of which those in `train` and `valid` have `labels`."""

    def __init__(
        self,
        table: NDArray[np.float32],
        categories: list[int],
        labels: Floats,
        train: Int64Array,
        valid: Int64Array,
        *,
        binary: bool,
        stop: Callable[[], None],
    ) -> None:
        import lightgbm

        self.lightgbm, self.table, self.binary, self.stop = lightgbm, table, binary, stop
        fixed: dict[str, Any] = {
            "params": {"max_bin": _BINS, "verbosity": -1, "feature_pre_filter": False},
            "categorical_feature": categories,
            "free_raw_data": False,
        }
        self.train = lightgbm.Dataset(table[train], labels[train], **fixed).construct()
        self.valid = lightgbm.Dataset(table[valid], labels[valid], reference=self.train, **fixed).construct()

    def fit(self, settings: dict[str, Any], rounds: int | None = None) -> Any:
        """Train with `settings` until the validation events stop improving, or for a number of `rounds`."""
        params = {
            "objective": "binary" if self.binary else "regression",
            "metric": "auc" if self.binary else "l2",
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": _num_threads(len(self.table)),
            "max_bin": _BINS,
            "verbosity": -1,
            "feature_pre_filter": False,
            "seed": 0,
            **settings,
        }

        def ask(_: Any) -> None:
            self.stop()

        callbacks: list[Any] = [ask]
        if rounds is None:
            callbacks.append(self.lightgbm.early_stopping(_PATIENCE, verbose=False))
        return self.lightgbm.train(
            params, self.train, rounds or _MOST_ROUNDS, valid_sets=[self.valid], callbacks=callbacks
        )

    def predict(self, model: Any, rows: Int64Array | None = None) -> Floats:
        """Return the predictions of a trained model for some or all rows."""
        table = self.table if rows is None else self.table[rows]
        return np.asarray(model.predict(table, num_threads=_num_threads(len(table))), np.float64)


def _num_threads(num_rows: int) -> int:
    """Return how many threads are worth it; the trees are the same with any number."""
    return torch.get_num_threads() if num_rows >= _ROWS_FOR_THREADS else 1
