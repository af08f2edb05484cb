"""Fitting each baseline with the settings that are best on the validation events.

Settings that were searched for are kept in the user's cache folder, by everything that they depend on, so that the next
run on the same data fits each method once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.action_baselines import boosted_trees, linear_methods
from turbogr.evaluation.action_baselines.action_rows import ActionRows, Counts
from turbogr.evaluation.action_baselines.prediction_judge import Floats, Judge
from turbogr.files import replace_text

MOST_TRAINING_EVENTS = 2_000_000  # the newest ones, for the methods that are fitted; counts and rates are of all

_SMOOTHING = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_DECAYS = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
_FACTORS = tuple(
    {"factors": factors, "lr": lr, "decay": decay}
    for lr in (0.01, 0.03)
    for factors in (8, 16)
    for decay in (1e-6, 1e-5, 1e-4)
)
_FACTOR_EPOCHS = 8
_PATIENCE = 2

Settings = dict[str, Any]


@dataclass
class MethodSearch:
    """Fits the methods on the rows of one store and split, each task on its own. `seed` decides what is drawn.

    `identity` is what the rows depend on; None keeps no settings. `num_trials` are those of LightGBM.
    """

    rows: ActionRows
    identity: str | None
    num_trials: int
    seed: int
    stop: Callable[[], None]
    chosen: dict[str, Settings] = field(default_factory=dict)
    _one_hot: sparse.csr_matrix | None = None
    _linear: dict[str, Floats] = field(default_factory=dict)

    def predictions(self, method: str, task: str) -> Floats:
        """Return the predictions [E] of a method for a task, by the settings that are best on the validation events."""
        if not len(self._train(task)) or not len(self._valid(task)):
            return np.full(len(self.rows.users), self.rows.rates[task])
        fit: dict[str, Callable[[str], Floats]] = {
            "log_rate": lambda task: np.full(len(self.rows.users), self.rows.rates[task]),
            "item_rate": lambda task: self._rate(task, "item_rate", self.rows.of_item),
            "user_rate": lambda task: self._rate(task, "user_rate", self.rows.of_user),
            "logistic_regression": self._logistic_regression,
            "fm": self._factorisation_machine,
            "lightgbm": self._boosted_trees,
        }
        return fit[method](task)

    # The methods. Each returns predictions of all events.

    def _rate(self, task: str, method: str, counts: Counts) -> Floats:
        def fit(settings: Settings) -> Floats:
            strength = settings["strength"]
            with np.errstate(invalid="ignore", divide="ignore"):
                found = (counts.sums[task] + strength * self.rows.rates[task]) / (counts.known[task] + strength)
            return np.where(np.isnan(found), self.rows.rates[task], found)

        trials = [{"strength": strength} for strength in _SMOOTHING]
        best, predictions = self._best(task, trials, fit)
        self.chosen[f"{method}/{task}"] = best
        return predictions

    def _logistic_regression(self, task: str) -> Floats:
        x, problem = self._problem(task)
        weights: Floats | None = None

        def fit(settings: Settings) -> Floats:
            nonlocal weights
            weights = linear_methods.fit_linear(problem, settings["decay"], weights)
            fits[settings["decay"]] = weights
            return problem.predictions(x @ weights.astype(np.float32))

        fits: dict[float, Floats] = {}
        # From the strongest decay on, each fit starts at the one before it. A kept setting is reached the same way.
        best, predictions = self._best(task, [{"decay": decay} for decay in _DECAYS], fit)
        self._linear[task] = fits[best["decay"]]
        self.chosen[f"logistic_regression/{task}"] = best
        return predictions

    def _factorisation_machine(self, task: str) -> Floats:
        x, problem = self._problem(task)
        if task not in self._linear:
            self._logistic_regression(task)

        def fit(settings: Settings) -> tuple[Floats, int]:
            chosen = linear_methods.FactorSettings(settings["factors"], settings["lr"], settings["decay"])
            machine = linear_methods.FactorisationMachine(problem, chosen, self._linear[task], self.seed)
            epochs = settings.get("epochs")
            return self._train_epochs(task, machine, x, problem, epochs)

        key = f"fm/{task}"
        kept = self._kept(key)
        if kept is None:
            best: tuple[float, Settings, Floats] | None = None
            for settings in _FACTORS:
                predictions, epochs = fit(dict(settings))
                value = self._judge(task).value(predictions[self._valid(task)])
                if best is None or value > best[0]:
                    best = value, {**settings, "epochs": epochs}, predictions
            assert best is not None
            self._keep(key, best[1])
            return best[2]
        return fit(kept)[0]

    def _train_epochs(
        self,
        task: str,
        machine: linear_methods.FactorisationMachine,
        x: sparse.csr_matrix,
        problem: linear_methods.Problem,
        epochs: int | None,
    ) -> tuple[Floats, int]:
        """Train for `epochs`, or until the validation events stop improving; return the best predictions and when."""
        judge, valid = self._judge(task), self._valid(task)
        valid_rows = x[valid]
        best, best_epoch, found = -np.inf, 0, np.zeros(0)
        for epoch in range(1, (epochs or _FACTOR_EPOCHS) + 1):
            machine.train_epoch()
            if epochs is not None:
                continue
            value = judge.value(problem.predictions(machine.scores(valid_rows)))
            if value > best:
                best, best_epoch = value, epoch
                found = problem.predictions(machine.scores(x))
            elif epoch - best_epoch >= _PATIENCE:
                break
        if epochs is not None:
            return problem.predictions(machine.scores(x)), epochs
        return found, best_epoch

    def _boosted_trees(self, task: str) -> Floats:
        labels, binary = self.rows.labels[task], self.rows.kinds[task] == "binary"
        table, categories = self.rows.table()
        valid = self._valid(task)
        trees = boosted_trees.BoostedTrees(
            table, categories, labels, self._train(task), valid, binary=binary, stop=self.stop
        )
        key = f"lightgbm/{task}"
        kept = self._kept(key)
        if kept is None:
            judge, best = self._judge(task), None
            for settings in boosted_trees.draw_settings(self.num_trials, self.seed):
                model = trees.fit(settings)
                value = judge.value(trees.predict(model, valid))
                if best is None or value > best[0]:
                    best = value, {**settings, "rounds": max(1, model.best_iteration)}, model
            assert best is not None
            self._keep(key, best[1])
            return trees.predict(best[2])
        rounds = kept.pop("rounds")
        return trees.predict(trees.fit(kept, rounds))

    # What they share.

    def _best(self, task: str, trials: list[Settings], fit: Callable[[Settings], Floats]) -> tuple[Settings, Floats]:
        """Fit all settings and return the best on the validation events, the first of equal ones, with predictions."""
        judge, valid = self._judge(task), self._valid(task)
        best: tuple[float, Settings, Floats] | None = None
        for settings in trials:
            self.stop()
            predictions = fit(settings)
            value = judge.value(predictions[valid])
            if best is None or value > best[0]:
                best = value, settings, predictions
        assert best is not None
        return best[1], best[2]

    def _problem(self, task: str) -> tuple[sparse.csr_matrix, linear_methods.Problem]:
        if self._one_hot is None:
            self._one_hot = self.rows.one_hot()
        train = self._train(task)
        binary = self.rows.kinds[task] == "binary"
        problem = linear_methods.Problem.of(self._one_hot[train], self.rows.labels[task][train], binary, self.stop)
        return self._one_hot, problem

    def _train(self, task: str) -> Int64Array:
        train = self.rows.train
        known = train[~np.isnan(self.rows.labels[task][train])]
        return known if len(known) <= MOST_TRAINING_EVENTS else self.rows.newest(known, MOST_TRAINING_EVENTS)

    def _valid(self, task: str) -> Int64Array:
        valid = self.rows.valid
        return valid[~np.isnan(self.rows.labels[task][valid])]

    def _judge(self, task: str) -> Judge:
        valid = self._valid(task)
        return Judge(self.rows.labels[task][valid], self.rows.users[valid], self.rows.kinds[task] == "binary")

    # Kept settings.

    def _kept(self, key: str) -> Settings | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(kept, dict):
            return None
        self.chosen[key] = dict(kept)
        return kept

    def _keep(self, key: str, settings: Settings) -> None:
        self.chosen[key] = dict(settings)
        file = self._file(key)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(settings) + "\n")
        except OSError:
            return  # it is a cache only

    def _file(self, key: str) -> Path | None:
        if self.identity is None:
            return None
        parts = json.dumps([_VERSION, self.identity, key, self.num_trials, self.seed, MOST_TRAINING_EVENTS])
        name = hashlib.sha256(parts.encode()).hexdigest()[:32]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "turbogr" / "action-baselines" / f"{name}.json"


_VERSION = 1  # of rows, methods and searches; settings that another version has found are not used
