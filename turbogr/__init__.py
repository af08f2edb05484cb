"""TurboGR: train generative recommenders on interaction logs, from a laptop to a cluster.

The names below are the Python API. They are imported when first used, so `import turbogr` is immediate. Two of them
are not called after their command: `train` and `evaluate` are packages, so the functions are `fit` and `evaluate_run`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbogr.api import evaluate_run
    from turbogr.config import Config, load_config
    from turbogr.data.prepare import prepare, prepare_table
    from turbogr.data.store import Store
    from turbogr.doctor import examine
    from turbogr.errors import UserError
    from turbogr.jagged import Jagged
    from turbogr.recommend import load
    from turbogr.report.page import write_report
    from turbogr.train.run import train as fit

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Jagged",
    "Store",
    "UserError",
    "evaluate_run",
    "examine",
    "fit",
    "load",
    "load_config",
    "prepare",
    "prepare_table",
    "write_report",
]

_ORIGINS = {
    "Config": "turbogr.config:Config",
    "Jagged": "turbogr.jagged:Jagged",
    "Store": "turbogr.data.store:Store",
    "UserError": "turbogr.errors:UserError",
    "evaluate_run": "turbogr.api:evaluate_run",
    "examine": "turbogr.doctor:examine",
    "fit": "turbogr.train.run:train",
    "load": "turbogr.recommend:load",
    "load_config": "turbogr.config:load_config",
    "prepare": "turbogr.data.prepare:prepare",
    "prepare_table": "turbogr.data.prepare:prepare_table",
    "write_report": "turbogr.report.page:write_report",
}


def __getattr__(name: str) -> Any:
    origin = _ORIGINS.get(name)
    if origin is None:
        raise AttributeError(f"module 'turbogr' has no attribute '{name}'")
    module, _, attribute = origin.partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORIGINS})
