"""A registry for one test: what it registers and imports is forgotten afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turbogr import plugins

BUILT_IN = [(kind, name) for kind in plugins.CHOSEN_BY if kind != "backend" for name in plugins.built_in_names(kind)]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test registers, and the modules of its plug-ins."""
    for kind, name in BUILT_IN:  # modules that stay imported must stay registered
        plugins.find(kind, name)
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))
    monkeypatch.setattr(plugins, "_loaded_files", dict(plugins._loaded_files))
    monkeypatch.setattr(plugins, "_listeners", {kind: list(each) for kind, each in plugins._listeners.items()})
    monkeypatch.setattr(plugins, "_noted", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if _is_of_a_plugin(name, tmp_path_factory.getbasetemp().resolve()):
            del sys.modules[name]


def forget_plugins() -> None:
    """Forget every component that is not built in, as a new process does."""
    for key, component in list(plugins._components.items()):
        if component.origin != "turbogr":
            del plugins._components[key]
    plugins._loaded_files.clear()


def _is_of_a_plugin(module: str, temporary: Path) -> bool:
    """Whether a module is a plug-in file or was written by a test. Others stay: modules that stay may refer to them."""
    file = getattr(sys.modules[module], "__file__", None)
    return module.startswith("turbogr_plugin_") or (file is not None and Path(file).resolve().is_relative_to(temporary))
