"""From a recipe to a config and back: YAML, overrides, plug-ins and the sections of the components they register."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from turbogr import plugins as registry
from turbogr.config.override_texts import Overrides, override_texts
from turbogr.config.recipe_lookup import find_recipe
from turbogr.config.schema import VERSION, Config
from turbogr.config.setting_names import is_setting, meant_settings, section_keys, section_keys_by_name
from turbogr.config.values import as_mapping, convert, parse, plain, read_value
from turbogr.errors import Note, UserError, did_you_mean

RENAMED = {"parallel.wire": "parallel.row_precision"}
"""Keys of earlier releases and what they are called now; recipes and `--set` may still use them."""

_RENAMED_MODELS = {"fuxi-gamma": "fuxi", "fuxi-beta": "fuxi-beta-days"}
"""Models of configs of version 1, and what they are called now."""

_KEYS = [f.name for f in dataclasses.fields(Config) if not f.metadata.get("derived")]
_KEYS_OF_USERS = ("tables", "features")  # sections whose keys are names that the user chooses


def load_config(path: str | Path, overrides: Overrides = (), *, plugins: Sequence[str | Path] = ()) -> Config:
    """Read a recipe, import its plug-ins, apply overrides in order, and check the result.

    Overrides are `section.key=value` texts, or a dict: {"train.epochs": 3} or {"train": {"epochs": 3}}.

    `path` is that of a YAML file, or the name of an installed recipe such as "quickstart" (see `find_recipe`).
    `plugins` are imported besides those that the recipe names; paths are relative to the current folder, those in the
    recipe to the recipe's. A run's config.yaml is a recipe too: to open a run without importing the files it names, use
    `load_run_config`.

    Raises:
        UserError: a recipe that does not exist or is not YAML, an unknown key, a value of the wrong type or out of
            range, or a plug-in that cannot be imported.
    """
    path = find_recipe(path)
    overrides = override_texts(overrides)
    tree = _read_tree(path, overrides, note_renamed=True)
    given = registry.load_plugins(plugins)
    stored = _named_plugins(tree, str(path))
    _check_not_in_a_run(path, stored, given)
    named = registry.load_plugins(stored, base=path.parent)
    tree["plugins"] = list(dict.fromkeys([*named, *given]))
    for override in overrides:
        _check_override(override)
    return _checked(tree, str(path))


def _check_not_in_a_run(path: Path, plugins: Sequence[str], given: Sequence[str]) -> None:
    """Raise UserError where the config.yaml of a run names a plug-in file that lies in the run's folder.

    A run names its plug-ins by their absolute paths and keeps no copies, so somebody else has put such a file there.
    """
    folder = path.parent.resolve()
    if not (folder / "run.json").exists():
        return
    for plugin in plugins:
        file = (folder / Path(plugin).expanduser()).resolve()
        if plugin.endswith(".py") and file.is_relative_to(folder) and str(file) not in given:
            raise UserError(
                f"{path} names the plug-in {plugin} in the folder of the run, which is not imported: the folder "
                f"may come from somebody else. If you trust it, add --plugins={file}"
            )


def load_run_config(run: str | Path) -> Config:
    """Read the config that a run was trained with, without importing any file that it names.

    Raises:
        UserError: as `load_config`, or a component of a plug-in that is neither installed nor loaded already.
    """
    path = Path(run) / "config.yaml"
    tree = _read_tree(path, (), note_renamed=False)
    stored = _named_plugins(tree, str(path))
    recorded = _recorded(Path(run))
    registry.ensure([*_chosen_in(tree), *_called(recorded)], run=run, stored=stored, recorded=recorded)
    return _checked(tree, str(path))


def dump_config(config: Config) -> str:
    """Return YAML from which `load_config` rebuilds the same config."""
    return yaml.safe_dump(_tree_of(config), sort_keys=False)


def flat_config(config: Config) -> dict[str, Any]:
    """Return every setting by its key as `--set` takes it, such as `train.lr` or `tables.item.dim`."""
    settings: dict[str, Any] = {}

    def add(prefix: str, node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                add(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            settings[prefix] = node

    tree = dataclasses.asdict(config)
    options, _ = tree.pop("options"), tree.pop("given")
    add("", {**tree, **options})
    return settings


def current_key(key: str) -> str:
    """Return what a setting is called now; `key` may be its name of an earlier release."""
    return RENAMED.get(key, key)


def with_plugins(config: Config, plugins: Sequence[str | Path]) -> Config:
    """Import plug-ins and return a copy that names them, and the files of all plug-ins that the config uses.

    Raises:
        UserError: a plug-in that cannot be imported, or a component that is not known.
    """
    loaded = registry.load_plugins([*config.plugins, *plugins])
    config.check_names()
    used = [registry.find(kind, name).origin for kind, name in config.chosen()]
    files = [origin for origin in used if origin.endswith(".py")]
    return dataclasses.replace(config, plugins=tuple(dict.fromkeys([*loaded, *files])))


def with_overrides(config: Config, overrides: Overrides) -> Config:
    """Return a copy with other settings; the components that they choose must be registered.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of range.
    """
    texts = override_texts(overrides)
    if not texts:
        return config
    tree = _tree_of(config)
    for text in texts:
        _check_override(text)
        _apply_override(tree, text)
    keys = tuple(current_key(text.partition("=")[0].strip()) for text in texts)
    return dataclasses.replace(_checked(tree, "the overrides"), given=(*config.given, *keys))


def with_options(config: Config) -> Config:
    """Return a copy in which every chosen component that has a section of its own has one, with defaults if unset.

    Raises:
        UserError: a component that is not known.
    """
    found = {name: cls() for name, cls in _sections(config.chosen()).items()}
    return dataclasses.replace(config, options={**found, **config.options})


def parse_config(tree: Mapping[str, Any], where: str) -> Config:
    """Build a config from the content of a recipe; the components that it chooses must be registered.

    Raises:
        UserError: an unknown key or component, or a value of the wrong type.
    """
    _check_keys(tree, where)
    config = parse(Config, {key: value for key, value in tree.items() if key in _KEYS}, where)
    rest = {str(key): value for key, value in tree.items() if key not in _KEYS}
    config.check_names()
    sections = _sections(config.chosen())
    for key in rest:
        if key not in sections:
            raise _unknown_key(key, sections, where)
    options = {key: convert(cls, rest.get(key), f"{where}: {key}", where) for key, cls in sections.items()}
    return dataclasses.replace(config, options=options, given=_given_keys(tree))


def _given_keys(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that a tree has, as `section.key`."""
    sections = [(name, keys) for name, keys in tree.items() if isinstance(keys, Mapping)]
    return tuple(f"{name}.{key}" for name, keys in sections for key in keys)


def _checked(tree: Mapping[str, Any], where: str) -> Config:
    config = parse_config(tree, where)
    config.check()
    return config


def _read_tree(path: Path, overrides: Sequence[str], *, note_renamed: bool) -> dict[str, Any]:
    """Read a recipe with overrides. A stored run may have old keys without a note: its user cannot change them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the recipe {path} is not valid YAML: {' '.join(str(error).split())}") from error
    tree = as_mapping({} if raw is None else raw, str(path))
    if tree.get("parallel") == "auto":
        tree["parallel"] = {}
    if isinstance(tree.get("model"), str):
        tree["model"] = {"name": tree["model"]}
    renamed = _rename_keys(tree, str(path))
    old_model = _update_version(tree)
    if old_model is not None and note_renamed:
        warnings.warn(_about_old_model(str(path), old_model), Note, stacklevel=3)
    for override in overrides:
        renamed += _apply_override(tree, override)
    for old in dict.fromkeys(renamed if note_renamed else []):
        warnings.warn(f"{old} is now {current_key(old)}; the old name still works", Note, stacklevel=3)
    return tree


def _update_version(tree: dict[str, Any]) -> str | None:
    """Make the tree one of today's version, in place; return its model's name of before, None if that means the same.

    A version that is not understood stays, for the check of the config.
    """
    if tree.get("version", 1) != 1:
        return None
    tree["version"] = VERSION
    model = tree.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(name, str) or name not in _RENAMED_MODELS:
        return None
    model["name"] = _RENAMED_MODELS[name]
    return str(name)


def _about_old_model(where: str, name: str) -> str:
    return (
        f"{where} has no version, so its model '{name}' is what is called '{_RENAMED_MODELS[name]}' now; for the block "
        f"that its authors call {name}, write version: {VERSION} at the top"
    )


def _rename_keys(tree: Mapping[str, Any], where: str) -> list[str]:
    """Give the keys of earlier releases their names of today, in place; return those found."""
    found = []
    for old, new in RENAMED.items():
        (section, key), (_, current) = old.split("."), new.split(".")
        settings = tree.get(section)
        if isinstance(settings, dict) and key in settings:
            if current in settings:
                raise UserError(f"{where} has both {old} and {new}, which is its name now; remove {old}")
            settings[current] = settings.pop(key)
            found.append(old)
    return found


def _apply_override(tree: dict[str, Any], override: str) -> list[str]:
    """Set a value in place; return its key if that is one of an earlier release."""
    path, equals, text = override.partition("=")
    given = path.strip()
    keys = current_key(given).split(".")
    if not equals or not all(keys):
        raise UserError(f"cannot read the override '{override}'; write it as section.key=value, e.g. train.epochs=5")
    node: Any = tree
    for key in keys[:-1]:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise UserError(f"cannot set '{path}': '{key}' is a value, not a section")
    node[keys[-1]] = read_value(text, override)
    return [given] if given in RENAMED else []


def _check_override(override: str) -> None:
    """Raise UserError for a key that is in no section; those of components' own sections are checked later."""
    name, _, value = override.partition("=")
    keys = current_key(name.strip()).split(".")
    if len(keys) == 1 and section_keys(keys[0]) and not isinstance(read_value(value, override), dict | None):
        of_name = f"{keys[0]}.name={value}"
        hint = f" Did you mean {of_name!r}?" if is_setting([keys[0], "name"]) else ""
        listed = ", ".join(section_keys(keys[0]))
        raise UserError(f"cannot set '{keys[0]}' to {value}: it is a section.{hint} Its keys: {listed}.")
    if is_setting(keys) or keys[0] in _KEYS_OF_USERS or (len(keys) > 1 and _is_component(keys[0])):
        return
    meant = meant_settings(keys[-1], keys[0])
    if meant:
        hint = f" Did you mean {' or '.join(map(repr, meant))}?"
    else:
        hint = f" Known keys: {', '.join(section_keys(keys[0]) or _KEYS)}."
    raise UserError(f"unknown key '{name.strip()}' in the override '{override}'.{hint}")


def _is_component(name: str) -> bool:
    return any(name in registry.names(kind) for kind in registry.CHOSEN_BY)


def _check_keys(tree: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an unknown key in a section; a key of another section is named with its section."""
    for section, keys in section_keys_by_name().items():
        settings = tree.get(section)
        for key in settings if isinstance(settings, Mapping) else ():
            if key not in keys:
                hint = _meant(str(key), section)
                raise UserError(f"unknown key '{key}' in {where}: {section}.{hint} Known keys: {', '.join(keys)}.")


def _meant(key: str, section: str | None = None) -> str:
    """Suggest a key, without its section if that is the one it stands in."""
    meant = [found.removeprefix(f"{section}.") for found in meant_settings(key, section)]
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def _named_plugins(tree: Mapping[str, Any], where: str) -> list[str]:
    return list(convert(tuple[str, ...], tree.get("plugins") or (), "plugins", where))


def _chosen_in(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The components that a tree chooses, as far as it can be read before they are known."""
    try:
        return parse(Config, {key: value for key, value in tree.items() if key in _KEYS}, "").chosen()
    except UserError:
        return []  # the tree is parsed again, with a proper message


def _sections(chosen: Sequence[tuple[str, str]]) -> dict[str, type]:
    """The dataclasses of the chosen components' own sections, by name."""
    sections: dict[str, type] = {}
    kinds: dict[str, str] = {}
    for kind, name in chosen:
        cls = registry.section_class(kind, name)
        if cls is None:
            continue
        if sections.setdefault(name, cls) is not cls:
            raise UserError(
                f"the {kinds[name]} and the {kind} '{name}' have a section of the same name; rename one of the two"
            )
        kinds[name] = kind
    return sections


def _unknown_key(key: str, sections: Mapping[str, type], where: str) -> UserError:
    for kind, setting in registry.CHOSEN_BY.items():
        if key in registry.names(kind) and kind not in ("source", "operator", "backend"):
            if registry.section_class(kind, key) is None:
                return UserError(f"{where}: the {kind} '{key}' has no section of its own; remove '{key}'")
            return UserError(f"{where} has a section of the {kind} '{key}', which {setting} does not choose; remove it")
    known = [*_KEYS, *sections]
    hint = did_you_mean(key, known) or _meant(key)
    return UserError(f"unknown key '{key}' in {where}.{hint} Known keys: {', '.join(known)}.")


def _recorded(run: Path) -> list[Any]:
    """What run.json has about the plug-ins' components; runs of version 0.1 have nothing."""
    try:
        found = json.loads((run / "run.json").read_text(encoding="utf-8")).get("components", [])
    except (OSError, ValueError, AttributeError):
        return []
    return found if isinstance(found, list) else []


def _called(recorded: Sequence[Any]) -> list[tuple[str, str]]:
    """The recorded components that no setting chooses: operators, and backends of them."""
    records = [record for record in recorded if isinstance(record, Mapping)]
    return [(str(r["kind"]), str(r.get("name"))) for r in records if r.get("kind") in ("operator", "backend")]


def _tree_of(config: Config) -> dict[str, Any]:
    tree = dataclasses.asdict(config)
    options, _ = tree.pop("options"), tree.pop("given")
    return dict(plain({**tree, **options}))
