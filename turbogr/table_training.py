"""`turbogr.train`: what the command does, and for tables in memory all of it in one call, without naming folders.

model = turbogr.train(events)            # a pandas, polars or pyarrow table with user, item and time
model.recommend(["alice"], k=10)
model.save("runs/mine")
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

from turbogr.config import Config, Overrides, override_texts
from turbogr.data.dataframes import is_table
from turbogr.data.prepare.preparation import prepare_table
from turbogr.data.store import Store
from turbogr.errors import UserError, warn_caller
from turbogr.recommend import Recommender, load
from turbogr.runs import RunFolder
from turbogr.training.run import train as train_run
from turbogr.training.trainer import TrainResult

RECIPE = "quickstart"


@overload
def train(
    recipe: str | Path | Config,
    data: str | Path,
    out: str | Path,
    /,
    *,
    overrides: Overrides = (),
    resume: bool = False,
    init_from: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
) -> TrainResult: ...


@overload
def train(first: Any = None, second: Any = None, third: Any = None, /, **options: Any) -> Any: ...


def train(
    first: Any = None,
    second: Any = None,
    third: Any = None,
    /,
    *,
    recipe: str | Path | Config | None = None,
    data: Any = None,
    out: str | Path | None = None,
    overrides: Overrides = (),
    resume: bool = False,
    init_from: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
    **prepare_options: Any,
) -> Any:
    """Train a recommender: `train(table)`, `train(recipe, data, out)`, or anything between, also by keywords.

    Args:
        recipe: the name of a recipe or a YAML file, or a `Config`; "quickstart" if left out.
        data: a pandas, polars or pyarrow table of events, a `Store`, or the folder of a prepared store.
        out: the run folder to write. If left out, the run is in a temporary folder, which is removed with the returned
            object or when the program ends; `save` keeps it.
        overrides: settings that replace those of the recipe: {"train.epochs": 3}, {"train": {"epochs": 3}} or
            ["train.epochs=3"].
        resume: continue the run at `out` from its newest checkpoint, with the same model and data; how long, how fast,
            on how many ranks and how it is evaluated may change. A folder that does not exist yet is started.
        init_from: a run whose parameters and item vectors a new run starts from; the data must extend that run's.
        plugins: files or modules of your own components, besides those that the recipe names.
        prepare_options: for a table, options of `prepare`, such as user_column or min_user_events.

    Returns:
        A `Recommender` of the trained run; with a recipe, a folder of data and a run folder the `TrainResult` of the
        run, which loads nothing.

    Ctrl-C writes a checkpoint and returns: what was trained so far recommends, and `resume` continues it. A process
    that torchrun has started trains together with the other ranks; `data` and `out` must be the same folders for all.

    Raises:
        UserError: a bad recipe, table, store or folder; NonFiniteError when training diverges.
    """
    recipe, data, out = _by_name((first, second, third), {"recipe": recipe, "data": data, "out": out})
    if data is None:
        raise UserError("there is nothing to train on; give a table of events, or name a prepared store with --data")
    settings: dict[str, Any] = {"resume": resume, "init_from": init_from, "plugins": plugins}
    if is_table(data):
        return _train_table(recipe or RECIPE, data, out, overrides, settings, prepare_options)
    if prepare_options:
        raise UserError(
            f"{', '.join(prepare_options)}: options of prepare go with a table of events, and the data is a prepared "
            "store; leave them out"
        )
    folder = data.path if isinstance(data, Store) else Path(data)
    if recipe is not None and out is not None and not isinstance(data, Store):
        return train_run(recipe, folder, out, overrides=overrides, **settings)
    with ExitStack() as cleanup:
        home = _temporary(cleanup) if out is None else None
        run = Path(out) if home is None else home / "run"
        result = train_run(recipe or RECIPE, folder, run, overrides=overrides, **settings)
        return _recommender(result, run, folder, plugins, home, cleanup)


def _by_name(given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return recipe, data and out; the first positional argument may be the data."""
    order = ["recipe", "data", "out"]
    if is_table(given[0]) or isinstance(given[0], Store):
        order = ["data", "out", "recipe"]
        if given[1] is not None:
            raise UserError("after a table or a store, name what follows: recipe=..., out=...")
    for name, value in zip(order, given, strict=True):
        if value is not None:
            if named[name] is not None:
                raise UserError(f"{name} is given twice, by position and by name; leave one of them out")
            named[name] = value
    return named["recipe"], named["data"], named["out"]


def _train_table(
    recipe: str | Path | Config,
    table: Any,
    out: str | Path | None,
    overrides: Overrides,
    settings: dict[str, Any],
    prepare_options: dict[str, Any],
) -> Recommender:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "several ranks cannot train on a table in memory; prepare it once with `turbogr prepare`, and give all of "
            "them that folder with --data"
        )
    with ExitStack() as cleanup:
        home = _temporary(cleanup)
        store = prepare_table(table, home / "data", **prepare_options)
        run = home / "run" if out is None else Path(out)
        texts = [*override_texts(overrides), "train.copy_data=always"]  # the store is temporary
        result = train_run(recipe, store.path, run, overrides=texts, **settings)
        sentence = RunFolder.open(run).keep_data(store, "always")
        if sentence is not None:
            raise UserError(sentence)
        shutil.rmtree(store.path)
        return _recommender(result, run, None, settings["plugins"], None if out is not None else home, cleanup)


def _recommender(
    result: TrainResult,
    run: Path,
    data: Path | None,
    plugins: Sequence[str | Path],
    home: Path | None,
    cleanup: ExitStack,
) -> Recommender:
    """Load a trained run; its temporary folder `home`, if any, is removed with the returned object."""
    if result.status == "interrupted":
        warn_caller(f"training was interrupted after step {result.step}; this is the model so far")
    recommender = load(run, data=data, plugins=plugins)
    recommender.result = result
    if home is not None:
        cleanup.pop_all()
        weakref.finalize(recommender, shutil.rmtree, home, ignore_errors=True)
    return recommender


def _temporary(cleanup: ExitStack) -> Path:
    home = Path(tempfile.mkdtemp(prefix="turbogr-"))
    cleanup.callback(shutil.rmtree, home, ignore_errors=True)
    return home
