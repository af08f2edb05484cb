"""TurboGR: train generative recommenders on interaction logs, from a laptop to a cluster.

The names in `__all__` are the Python API. Each is imported when first used, so `import turbogr` is immediate. The names
of 0.1.0 in `_RENAMED` still work, with a DeprecationWarning.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbogr.api import evaluate
    from turbogr.config import Config, load_config, recipe_names
    from turbogr.data.prepare.item_table import add_item_info
    from turbogr.data.prepare.preparation import prepare, prepare_table
    from turbogr.data.store import Store
    from turbogr.doctor import examine
    from turbogr.errors import UserError
    from turbogr.exports.folder_writer import export
    from turbogr.jagged import Jagged
    from turbogr.ranker import load_ranker
    from turbogr.recommend import load
    from turbogr.report.page import write_report
    from turbogr.table_training import train
    from turbogr.tuning.tuner import tune

    evaluate_run = evaluate
    fit = train

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Jagged",
    "Store",
    "UserError",
    "add_item_info",
    "evaluate",
    "examine",
    "export",
    "load",
    "load_config",
    "load_ranker",
    "prepare",
    "prepare_table",
    "recipe_names",
    "train",
    "tune",
    "write_report",
]

_ORIGINS = {
    "Config": "turbogr.config:Config",
    "Jagged": "turbogr.jagged:Jagged",
    "Store": "turbogr.data.store:Store",
    "UserError": "turbogr.errors:UserError",
    "add_item_info": "turbogr.data.prepare.item_table:add_item_info",
    "evaluate": "turbogr.api:evaluate",
    "examine": "turbogr.doctor:examine",
    "export": "turbogr.exports.folder_writer:export",
    "load": "turbogr.recommend:load",
    "load_config": "turbogr.config:load_config",
    "load_ranker": "turbogr.ranker:load_ranker",
    "prepare": "turbogr.data.prepare.preparation:prepare",
    "prepare_table": "turbogr.data.prepare.preparation:prepare_table",
    "recipe_names": "turbogr.config:recipe_names",
    "train": "turbogr.table_training:train",
    "tune": "turbogr.tuning.tuner:tune",
    "write_report": "turbogr.report.page:write_report",
}

_RENAMED = {"evaluate_run": "evaluate", "fit": "train"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        current = _RENAMED[name]
        warnings.warn(f"turbogr.{name} is now turbogr.{current}", DeprecationWarning, stacklevel=2)
        value = globals()[name] = getattr(importlib.import_module(__name__), current)
        return value
    origin = _ORIGINS.get(name)
    if origin is None:
        raise AttributeError(f"module 'turbogr' has no attribute '{name}'")
    module, _, attribute = origin.partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGINS})
