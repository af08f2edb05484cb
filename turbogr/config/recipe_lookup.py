"""Recipes by name: those in `turbogr/recipes`, which are installed with the package, and files of the user's.

`quickstart` and `ml-1m/hstu` are names. A file wins over a name, so a recipe of your own is never replaced.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from turbogr.errors import Note, UserError, nearest_names
from turbogr.plugins import built_in_names

FOLDER = Path(__file__).parents[1] / "recipes"
SIMPLE = "simple"
"""Folder of the recipes of simple methods, which go by their own names too: `ease` is `simple/ease`."""
_RENAMED = {"paper/fuxi-gamma": "paper/fuxi"}
"""Recipes of earlier releases, and what they are called now."""

_LISTING = "`turbogr recipes` lists the names."


def recipe_names() -> list[str]:
    """Return the names of the recipes that are installed, quickstart first."""
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def recipe_summary(name: str) -> str:
    """Return the first line of a recipe, which says what it is."""
    with recipe_file(name).open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def recipe_file(name: str) -> Path:
    """Return the file of an installed recipe."""
    return FOLDER / f"{name}.yaml"


def find_recipe(given: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe: the file that `given` is the path of, else the installed recipe of that name.

    The recipe of a simple method goes by the method's name: `ease`.

    A path `recipes/NAME.yaml`, as in a clone of the repository, means the installed recipe NAME where there is no
    folder `recipes`; a note says so. In any other path a name is only suggested: the file may be a changed copy.

    Raises:
        UserError: neither a file nor a name; the message names what was probably meant.
    """
    path, text = Path(given), os.fspath(given)
    names = recipe_names()
    if text in _RENAMED and not path.is_file():
        text = _RENAMED[text]
        warnings.warn(f"the recipe {os.fspath(given)} is now {text}; the old name still works", Note, stacklevel=2)
        path = Path(text)
    for name in (text, f"{SIMPLE}/{text}"):
        if name in names and not path.is_file():
            return recipe_file(name)
    if path.exists() and not path.is_dir():
        return path
    if path.is_dir():
        raise UserError(_about_folder(path, names))
    parts = Path(os.path.normpath(text)).with_suffix("").parts
    name = "/".join(parts[1:])
    if parts[0] == FOLDER.name and not Path(parts[0]).is_dir() and name in names:
        warnings.warn(f"there is no file {text}; taking the installed recipe {name!r}", Note, stacklevel=2)
        return recipe_file(name)
    raise UserError(
        f"cannot read the recipe {text}: there is no such file and no recipe of that name.{_suggestion(path, names)} "
        f"{_LISTING}"
    )


def _about_folder(folder: Path, names: list[str]) -> str:
    inside = [name for name in names if name.startswith(f"{folder.name}/")]
    if (folder / "config.yaml").is_file():
        return f"cannot read the recipe {folder}: it is a run folder; its recipe is {folder / 'config.yaml'}"
    if inside:
        return f"cannot read the recipe {folder}: it is a folder. Recipes of that name: {', '.join(inside)}"
    return f"cannot read the recipe {folder}: it is a folder; name a YAML file in it, or a recipe. {_LISTING}"


def _suggestion(path: Path, names: list[str]) -> str:
    """Suggest files beside the one that does not exist, and names; "" where nothing is near."""
    plain = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
    beside = [file for file in path.parent.glob("*.y*ml") if file.is_file()] if path.parent.is_dir() else []
    files = [str(path.parent / name) for name in nearest_names(plain.name, [file.stem for file in beside])]
    files = [f"{file}.yaml" if Path(f"{file}.yaml").is_file() else f"{file}.yml" for file in files]
    if plain.name in built_in_names("block") and len(plain.parts) == 1:
        return f" quickstart trains any model on any log: --set model.name={plain.name} chooses this one."
    found = [repr(each) for each in [*files, *_likely_names(plain.parts, names)]]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _likely_names(parts: tuple[str, ...], names: list[str]) -> list[str]:
    """Return the names that a path ends with, else the nearest ones, else those of a group such as ml-1m."""
    tails = ["/".join(parts[start:]) for start in range(len(parts))]
    exact = [tail for tail in tails if tail in names]
    of_group = [name for name in names if name.startswith(f"{parts[-1]}/")]
    return exact or of_group or nearest_names("/".join(parts[-2:]), names)
