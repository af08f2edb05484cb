"""The one registry of everything that is chosen by name: blocks, masks, losses, samplers, metrics, sources, tasks,
operators and backends.

A plug-in is a module or a file that registers a component:

    @register("block", "conv", config=ConvConfig)
    class ConvBlock(Block): ...

It is found in three ways: a recipe names it (`plugins: [my_block.py]`), the user gives it (`--plugins my_block.py`), or
an installed package declares it (entry-point group `turbogr.plugins`). Built-in components are listed here with their
module, which is imported when the component is first used, so listing names imports nothing.

A stored run names its plug-ins too, but a run folder may come from anyone: `ensure` imports none of the files that it
names. They must be installed, or given again.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turbogr.errors import Note, UserError, did_you_mean

_T = TypeVar("_T")

ENTRY_POINTS = "turbogr.plugins"
"""The entry-point group by which installed packages declare their plug-in modules."""

CHOSEN_BY = {
    "block": "model.name",
    "method": "model.name",
    "mask": "model.mask",
    "loss": "loss.name",
    "sampler": "loss.sampler",
    "metric": "evaluate.metrics",
    "task": "task",
    "backend": "train.backend",
    "source": "the source of `turbogr prepare`",
    "operator": "the code that calls it",
}
"""The kinds of components, and what chooses one."""

RESERVED = (
    "version",
    "plugins",
    "task",
    "model",
    "loss",
    "optimizer",
    "data",
    "tables",
    "features",
    "evaluate",
    "deliver",
    "train",
    "parallel",
    "pipeline",
    "defaults",
)
"""The sections of a config, which no component's own section may be named after."""

_BUILT_IN: dict[str, dict[str, str]] = {
    "block": {
        "hstu": "turbogr.layers.hstu",
        "sasrec": "turbogr.layers.sasrec",
        "fuxi": "turbogr.layers.fuxi",
        "fuxi-alpha": "turbogr.layers.fuxi",
        "fuxi-beta": "turbogr.layers.fuxi",
        "fuxi-beta-days": "turbogr.layers.fuxi",
        "fuxi-gamma": "turbogr.layers.fuxi",
        "fuxi-linear": "turbogr.layers.fuxi_linear",
        "stu": "turbogr.layers.stu",
    },
    "method": {
        "popularity": "turbogr.simple.methods",
        "recent-items": "turbogr.simple.methods",
        "item-knn": "turbogr.simple.methods",
        "session-knn": "turbogr.simple.methods",
        "skip-markov": "turbogr.simple.methods",
        "ease": "turbogr.simple.methods",
        "ease-recency": "turbogr.simple.methods",
    },
    "mask": {"causal": "turbogr.layers.attention_masks", "window": "turbogr.layers.attention_masks"},
    "loss": {
        "sampled-softmax": "turbogr.negatives.sampled_softmax_loss",
        "full-softmax": "turbogr.negatives.full_softmax_loss",
        "bce": "turbogr.negatives.binary_losses",
        "gbce": "turbogr.negatives.binary_losses",
    },
    "sampler": {
        "uniform": "turbogr.negatives.samplers",
        "popularity": "turbogr.negatives.samplers",
        "in-batch": "turbogr.negatives.samplers",
        "mixture": "turbogr.negatives.samplers",
    },
    "metric": {},
    "task": {"retrieval": "turbogr.tasks.retrieval", "ranking": "turbogr.tasks.ranking"},
    "backend": {"cpu": "turbogr.ops", "reference": "turbogr.ops", "triton": "turbogr.ops"},
    "source": {
        "synthetic": "turbogr.data.prepare.sources.synthetic",
        "csv": "turbogr.data.prepare.sources.delimited",
        "tsv": "turbogr.data.prepare.sources.delimited",
        "parquet": "turbogr.data.prepare.sources.parquet",
        "jsonl": "turbogr.data.prepare.sources.jsonl",
        "movielens": "turbogr.data.prepare.sources.public",
        "amazon": "turbogr.data.prepare.sources.public",
        "sasrec": "turbogr.data.prepare.sources.public",
        "p5": "turbogr.data.prepare.sources.item_lists",
        "recbole": "turbogr.data.prepare.sources.public",
        "kuairand": "turbogr.data.prepare.sources.public",
    },
    "operator": {},
}
"""Modules of the built-in components by kind and name, in the order in which they are listed."""

_BUILT_IN_SECTIONS = frozenset(
    {
        *(("method", name) for name in _BUILT_IN["method"] if name != "popularity"),
        ("task", "ranking"),
        ("block", "fuxi-linear"),
        ("block", "sasrec"),
        ("block", "stu"),
        ("mask", "window"),
        ("loss", "gbce"),
        ("source", "synthetic"),
        ("source", "kuairand"),
    }
)
"""The built-in components with a section of their own; those of the others are known without importing them."""


@dataclass(frozen=True)
class Component:
    """Something that a config chooses by name.

    `factory` is what was registered, a class or a function. `config` is the dataclass of its own section, None if it
    has none. `origin` is "turbogr", the name of a plug-in's module, or the path of its file; `file` is where its code
    is. A backend serves one `operator`.
    """

    kind: str
    name: str
    factory: Any
    config: type | None = None
    origin: str = "turbogr"
    file: Path | None = None
    operator: str | None = None

    @property
    def title(self) -> str:
        """The name as people write it."""
        return getattr(self.factory, "title", "") or self.name

    def section(self, options: Mapping[str, Any] | None) -> Any:
        """Return the component's own section among those of a config, with defaults if unset; None if it has none."""
        if self.config is None:
            return None
        return (options or {}).get(self.name) or self.config()

    def make(self, *arguments: Any, options: Any = None) -> Any:
        """Call the factory, with the component's own section as the last argument if it has one.

        Without `options` the section has its defaults.
        """
        if self.config is None:
            return self.factory(*arguments)
        return self.factory(*arguments, self.config() if options is None else options)

    def record(self) -> dict[str, str | None]:
        """Return what run.json keeps of a plug-in's component."""
        return {"kind": self.kind, "name": self.name, "origin": self.origin, "sha256": sha256(self.file)}


@dataclass(frozen=True)
class _LoadedFile:
    module: str
    sha256: str | None


_components: dict[tuple[str, str, str | None], Component] = {}
_listeners: dict[str, list[Callable[[Component], None]]] = {}
_loaded_files: dict[Path, _LoadedFile] = {}
_entry_points_loaded = False
_noted: set[str] = set()


def register(kind: str, name: str, *, config: type | None = None, operator: str | None = None) -> Callable[[_T], _T]:
    """Return a decorator that makes a class or function known as the component `name` of a `kind`.

    `config` is a frozen dataclass: the component's own section of a recipe, which it gets as its `options`. It may have
    a method `check()` that raises UserError. `operator` is the operator that a backend serves.

    Raises:
        UserError: an unknown kind, a name that is taken, or one that is a section of every config.
    """
    _check_kind(kind)
    caller = sys._getframe(1).f_globals
    module = str(caller.get("__name__", ""))
    file = Path(caller["__file__"]).resolve() if caller.get("__file__") else None
    if config is not None and name in RESERVED:
        raise UserError(f"the {kind} '{name}' cannot have a section of its own: every recipe has one of that name")

    def add(factory: _T) -> _T:
        origin = _origin(module, file)
        if kind == "method" and origin != "turbogr":
            raise UserError(
                f"the method '{name}' of {origin} cannot be added: simple methods are those of this package"
            )
        taken = _components.get((kind, name, operator))
        taken_by = taken.origin if taken else "turbogr" if name in _BUILT_IN[kind] and operator is None else None
        if taken_by not in (None, origin) and not (taken and file is not None and taken.file == file):
            raise UserError(f"the {kind} '{name}' of {origin} is already registered by {taken_by}; choose another name")
        component = Component(kind, name, factory, config, origin, file, operator)
        _components[kind, name, operator] = component
        for listener in _listeners.get(kind, []):
            listener(component)
        return factory

    return add


def listen(kind: str, listener: Callable[[Component], None]) -> None:
    """Call `listener` with every component of a kind: those registered already, and every later one."""
    _check_kind(kind)
    _listeners.setdefault(kind, []).append(listener)
    for component in [c for c in _components.values() if c.kind == kind]:
        listener(component)


def names(kind: str) -> list[str]:
    """Return the names of a kind: built-in ones first, then those of plug-ins, installed ones included."""
    _check_kind(kind)
    _load_entry_points()
    registered = [name for (of, name, _) in _components if of == kind]
    return list(dict.fromkeys([*_BUILT_IN[kind], *(_backends() if kind == "backend" else []), *registered]))


def check_name(kind: str, name: str, key: str | None = None) -> None:
    """Raise UserError with the nearest name if there is no component of that name; `key` is the setting that names
    it."""
    if _is_known(kind, name):
        return
    known = names(kind)
    if name not in known:
        known = [*known, *names("method")] if kind == "block" else known
        known = ["auto", *known] if kind == "backend" else known
        hint = did_you_mean(name, known)
        said = f"{key or CHOSEN_BY[kind]} is '{name}'; choose from {', '.join(known) or 'none'}.{hint}"
        raise UserError(f"{said} A plug-in that has it must be named by `plugins` in the recipe or by --plugins")


def find(kind: str, name: str) -> Component:
    """Return the component of a kind and name; a built-in one is imported now.

    Raises:
        UserError: there is none; the message has the nearest name.
    """
    check_name(kind, name)
    if not any((of, named) == (kind, name) for of, named, _ in _components):
        if kind == "backend":  # it is a file in the folders of operators, not registered here
            return Component(kind, name, None)
        importlib.import_module(_BUILT_IN[kind][name])
    found = [c for (of, named, _), c in _components.items() if (of, named) == (kind, name)]
    assert found, f"{_BUILT_IN[kind][name]} does not register the {kind} '{name}'"
    return found[0]


def section_class(kind: str, name: str) -> type | None:
    """Return the dataclass of a component's own section, None if it has none.

    Raises:
        UserError: there is no such component.
    """
    if name in built_in_names(kind) and (kind, name) not in _BUILT_IN_SECTIONS:
        return None
    return find(kind, name).config


def built_in_names(kind: str) -> list[str]:
    """Return the names of a kind that are part of this package."""
    _check_kind(kind)
    return list(_BUILT_IN[kind])


def load_plugins(plugins: Sequence[str | Path], *, base: str | Path = ".") -> list[str]:
    """Import modules by name and files by path, relative to `base`; return them with absolute paths.

    A file that was imported before, or a copy of one, is imported again only if it has changed.

    Raises:
        UserError: a file or module that is missing or cannot be imported; the reason is in the message.
    """
    loaded = []
    for plugin in map(str, plugins):
        if _is_file(plugin):
            path = (Path(base) / Path(plugin).expanduser()).resolve()
            _load_file(path)
            loaded.append(str(path))
        else:
            _load_module(plugin)
            loaded.append(plugin)
    return list(dict.fromkeys(loaded))


def ensure(
    needed: Iterable[tuple[str, str]], *, run: str | Path, stored: Sequence[str] = (), recorded: Sequence[Any] = ()
) -> None:
    """Check that the components (kind, name) that a stored run needs are there, without importing any file it names.

    `stored` are the plug-ins of its config: installed modules among them are imported. `recorded` are the entries of
    its run.json about components: one whose code has changed since is a Note.

    Raises:
        UserError: a component is missing; the message names its plug-in and what to type.
    """
    records = {(str(r.get("kind")), str(r.get("name"))): r for r in recorded if isinstance(r, Mapping)}
    for kind, name in needed:
        if not _is_known(kind, name):
            _load_entry_points()
        for plugin in stored:
            if not _is_known(kind, name) and not _is_file(plugin) and is_installed(plugin):
                _load_module(plugin)
        record = records.get((kind, name), {})
        if not _is_known(kind, name):
            raise _missing(kind, name, run, record.get("origin"), stored)
        if record:
            _note_change(find(kind, name), record, run)


def record(needed: Iterable[tuple[str, str]]) -> list[dict[str, str | None]]:
    """Return what run.json keeps of the components (kind, name) that plug-ins provide."""
    found = (find(kind, name) for kind, name in needed)
    return [component.record() for component in found if component.origin != "turbogr"]


def operators_of(loaded: Sequence[str]) -> list[tuple[str, str]]:
    """Return the operators that these plug-ins have registered, and the backends of such operators, as (kind, name).

    No setting chooses them: any code may call an operator, so a run that names the plug-in needs them.
    """
    own = [c for c in _components.values() if any(_is_part(c.origin, plugin) for plugin in loaded)]
    added = {c.name for c in _components.values() if c.kind == "operator"}
    found = [c for c in own if c.kind == "operator" or (c.kind == "backend" and c.operator in added)]
    return [(component.kind, component.name) for component in found]


def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package: one in a site folder of this Python, not in any other."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return False
    places = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])] if spec else []
    return any(Path(place).resolve().is_relative_to(folder) for place in places for folder in _site_folders())


def sha256(file: Path | None) -> str | None:
    """Return the SHA-256 of a file, None if it cannot be read."""
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _check_kind(kind: str) -> None:
    if kind not in CHOSEN_BY:
        raise UserError(
            f"there is no kind '{kind}' of component; choose from {', '.join(CHOSEN_BY)}."
            f"{did_you_mean(kind, CHOSEN_BY)}"
        )


def _is_known(kind: str, name: str) -> bool:
    _check_kind(kind)
    if name in _BUILT_IN[kind] or any((of, named) == (kind, name) for of, named, _ in _components):
        return True
    return kind == "backend" and name in _backends()


def _backends() -> list[str]:
    """The backends that operators of this package have in their folders; imports all operators."""
    registry = importlib.import_module("turbogr.ops.registry")
    return [backend.name for backend in registry.backends()]


def _origin(module: str, file: Path | None) -> str:
    if module.split(".")[0] == "turbogr":
        return "turbogr"
    is_plain_file = module == "__main__" or any(loaded.module == module for loaded in _loaded_files.values())
    return str(file) if is_plain_file and file is not None else module


def _is_part(origin: str, plugin: str) -> bool:
    return origin == plugin or (not _is_file(plugin) and origin.startswith(f"{plugin}."))


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py") or "/" in plugin or os.sep in plugin


def _load_file(path: Path) -> None:
    digest = sha256(path)
    if digest is None:
        raise UserError(f"the plug-in {path} cannot be read; check the path: one in a recipe is relative to its folder")
    if _is_main(path) or any(loaded.sha256 == digest for loaded in _loaded_files.values()):
        return
    name = f"turbogr_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"the plug-in {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does: dataclasses and pickle look a class's module up
    _loaded_files[path] = _LoadedFile(name, digest)
    before = dict(_components)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _components.clear()
        _components.update(before)
        del sys.modules[name], _loaded_files[path]
        raise _broken(str(path), error) from error


def _is_main(path: Path) -> bool:
    """Whether a file is the program that runs, which has registered its components already."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return main is not None and Path(main).resolve() == path


def _load_module(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            raise UserError(
                f"there is no module '{module}' for the plug-in of that name; install it, or give a file: {module}.py"
            ) from error
        raise _broken(module, error) from error
    except Exception as error:
        raise _broken(module, error) from error


def _broken(plugin: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return UserError(f"the plug-in {plugin}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    line = f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return UserError(f"the plug-in {plugin} cannot be imported: {type(error).__name__}: {error}{line}")


def _load_entry_points() -> None:
    """Import what installed packages declare, once; one that cannot be imported is a warning."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if not _declared_by_installed(entry):
            continue
        try:
            _load_module(entry.module)
        except UserError as error:
            warnings.warn(f"{error} (installed by {_distribution(entry)})", stacklevel=2)


def _declared_by_installed(entry: importlib.metadata.EntryPoint) -> bool:
    """Whether the package lies in a site folder: metadata in the current folder may be part of somebody's run."""
    located = entry.dist.locate_file("") if entry.dist is not None else None
    return located is not None and any(Path(str(located)).resolve() == folder for folder in _site_folders())


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _site_folders() -> list[Path]:
    folders = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder).resolve() for folder in folders if folder]


def _missing(kind: str, name: str, run: str | Path, origin: Any, stored: Sequence[str]) -> UserError:
    plugin = str(origin) if isinstance(origin, str) else stored[0] if len(stored) == 1 else None
    if plugin is not None and not _is_file(plugin):
        remedy = f"install the package that has the module '{plugin}', or give it with --plugins={plugin}"
    else:
        remedy = f"give it again with --plugins={plugin or 'FILE'}"
    of = f" of the plug-in {plugin}" if plugin else " of a plug-in"
    reason = "a run's own files are never imported, and this one is not installed"
    return UserError(f"{run} needs the {kind} '{name}'{of}; {reason}. If you trust it, {remedy}")


def _note_change(component: Component, recorded: Mapping[str, Any], run: str | Path) -> None:
    now = sha256(component.file)
    if now == recorded.get("sha256"):
        return
    message = (
        f"the {component.kind} '{component.name}' has changed since {run} was trained: {component.origin} has SHA-256 "
        f"{str(now)[:12]}, the run recorded {str(recorded.get('sha256'))[:12]} of {recorded.get('origin')}"
    )
    if message not in _noted:
        _noted.add(message)
        warnings.warn(message, Note, stacklevel=3)
