"""Simple methods that a ranking model must beat, on the same events and features, with settings chosen on validation.

    log_rate             the rate of the training events
    item_rate, user_rate the smoothed rate of the item in the training events, of the user before the request
    logistic_regression  on ids, features, and counts and rates of earlier events
    fm                   a factorisation machine on the same
    lightgbm             gradient boosted trees on features, counts and rates; LightGBM must be installed

Of a task that is a number they predict means instead of rates, and the regression is a linear one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import UserError, did_you_mean
from turbogr.evaluation.action_baselines import boosted_trees
from turbogr.evaluation.action_baselines.action_rows import action_rows
from turbogr.evaluation.action_baselines.method_search import MethodSearch
from turbogr.evaluation.action_evaluation import ActionEvaluation, Floats, HeldOutActions, Target, measure_actions
from turbogr.evaluation.job_pool import Interrupted

__all__ = ["BASELINES", "NUM_TRIALS", "measure_action_baselines", "refused_action_baselines"]

BASELINES = ("log_rate", "item_rate", "user_rate", "logistic_regression", "fm", "lightgbm")
NUM_TRIALS = 50  # settings of LightGBM that are tried, each on the validation events

_fits: dict[tuple[object, ...], dict[str, Floats]] = {}


def refused_action_baselines(names: Sequence[str] | None = None) -> dict[str, str]:
    """Return which of the baselines `names` (None: all) cannot be fitted here, with the reason.

    Raises:
        UserError: a name that is none.
    """
    wanted = BASELINES if names is None else names
    for name in wanted:
        if name not in BASELINES:
            raise UserError(
                f"evaluate.baselines has {name!r}; a ranking run may have {', '.join(BASELINES)}."
                f"{did_you_mean(name, BASELINES)}"
            )
    return {} if "lightgbm" not in wanted or boosted_trees.is_installed() else {"lightgbm": boosted_trees.NOT_INSTALLED}


def measure_action_baselines(
    store: Store,
    split: Split,
    part: str,
    targets: Mapping[str, Target],
    columns: Mapping[str, str] | None = None,
    *,
    names: Sequence[str] | None = None,
    seed: int = 0,
    num_trials: int = NUM_TRIALS,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, ActionEvaluation]:
    """Measure baselines on all events of `part`, by name in the order of `BASELINES`.

    `columns` are the features of the run (keys of the store by name); None means all features of the store. Those of
    `refused_action_baselines` are left out. What was fitted is kept for the next part.

    Raises:
        UserError: an unknown name, or a part without events.
        Interrupted: `should_stop` returned True.
    """
    refused = refused_action_baselines(names)
    wanted = [name for name in BASELINES if (names is None or name in names) and name not in refused]
    held_out = HeldOutActions.of(store, split, part, targets)
    if columns is None:
        keys = [key for key, column in store.features.items() if column.owner != "action"]
    else:
        keys = sorted({key for key in columns.values() if key in store.features and not key.startswith("action.")})
    tasks = tuple((name, target.action or name, target.kind) for name, target in targets.items())
    identity = (store.manifest.content_hash, split.rule, tasks, tuple(keys))

    def stop() -> None:
        if should_stop is not None and should_stop():
            raise Interrupted("interrupted before the baselines were measured")

    keys_of = {name: (*identity, name, num_trials, seed) for name in wanted}
    missing = [name for name in wanted if keys_of[name] not in _fits]
    if missing:
        rows = action_rows(store, split, targets, keys, stop=stop)
        search = MethodSearch(rows, repr(identity) if store.manifest.content_hash else None, num_trials, seed, stop)
        for name in missing:
            fitted = {task: search.predictions(name, task) for task in targets}
            if len(_fits) > 2 * len(BASELINES):
                _fits.clear()
            _fits[keys_of[name]] = fitted
    found = {}
    for name in wanted:
        fitted = _fits[keys_of[name]]
        predictions = {task: predicted[held_out.events] for task, predicted in fitted.items()}
        found[name] = measure_actions(held_out, predictions, warn=False)
    return found
