"""TurboGR: train generative recommenders on interaction logs, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbogr.recommend import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `load` when it is first used, so that `import turbogr` does not wait for torch."""
    if name == "load":
        from turbogr.recommend import load

        return load
    raise AttributeError(f"module 'turbogr' has no attribute '{name}'")
