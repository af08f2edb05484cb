"""Check the structure of the package: the order of imports, and the names of modules.

`make lint` runs it.

- Every module imports only from modules that stand above it in the list of ARCHITECTURE.md. The list is the block that
  starts at `turbogr/`; an entry is a file (`jagged.py`) or a package (`ops/`), and imports within a package are free.
  The root package itself (`from turbogr import __version__`) may be imported by all, and may import anything.
- No two modules have the same file name. A command, an operator's backend or a benchmark may have the name of what
  it serves.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "turbogr"
MAY_SHARE_NAMES = ("ops", "commands", "bench")


def read_layers(text: str) -> list[str]:
    """Return the names of the modules in the order of the architecture's list.

    Raises:
        ValueError: no list found.
    """
    layers: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(f"{PACKAGE}/"):
            inside = True
        elif inside and line.startswith("  ") and line.strip():
            entry = line.split()[0]
            if line[2] != " " and entry.endswith(("/", ".py")):
                layers.append(entry.removesuffix("/").removesuffix(".py"))
        elif inside:
            break
    if not layers:
        raise ValueError(f"no list of modules under a line '{PACKAGE}/' found")
    return layers


def imported_layers(source: str, module: list[str], known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, layer) for every import of a module of the package, relative ones included.

    `module` is the importing package's path, e.g. ["turbogr", "ops"]; `known` are the names of all layers.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in known:
                yield node.lineno, parts[1]


def find_violations(root: Path) -> list[str]:
    """Return a line for every import against the order, every module that is not in the list, and every shared name."""
    layers = read_layers((root / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    position = {name: index for index, name in enumerate(layers)}
    files = sorted((root / PACKAGE).rglob("*.py"))
    owners = {path: path.relative_to(root / PACKAGE).with_suffix("").parts[0] for path in files}
    known = {owner for owner in owners.values() if not owner.startswith("__")}
    problems = [f"ARCHITECTURE.md: {PACKAGE}/{name} is not in the list" for name in sorted(known - position.keys())]
    for path, owner in owners.items():
        if owner not in position:
            continue
        module = list(path.relative_to(root).parent.parts)
        for line, layer in imported_layers(path.read_text(encoding="utf-8"), module, known):
            if layer != owner and position.get(layer, -1) > position[owner]:
                problems.append(f"{path.relative_to(root)}:{line}: '{owner}' stands above '{layer}' and imports it")
    return problems + shared_names(root)


def shared_names(root: Path) -> list[str]:
    """Return a line for every file name that two modules have, except those that may share one."""
    paths = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.name != "__init__.py" and path.relative_to(root / PACKAGE).parts[0] not in MAY_SHARE_NAMES:
            paths[path.name].append(str(path.relative_to(root)))
    return [f"{', '.join(same)}: modules with the same name; rename one" for same in paths.values() if len(same) > 1]


def main(root: Path) -> int:
    """Print the violations and return 1 if there are any."""
    problems = find_violations(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))
