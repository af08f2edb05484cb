"""Check that every module imports only from modules that stand above it in ARCHITECTURE.md's list.

`make lint` runs it. The list is the block that starts at `turbogr/`; an entry is a file (`jagged.py`) or a package
(`ops/`), and imports within a package are free. The root package itself (`from turbogr import __version__`) may be
imported by all; as the public face it may name anything.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "turbogr"


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

    `module` is the importing package's path, e.g. ["turbogr", "ops"]; `known` are the names that are modules.
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
    """Return a line for every import that goes up the list and every module that the list lacks."""
    layers = read_layers((root / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    rank = {name: place for place, name in enumerate(layers)}
    files = sorted((root / PACKAGE).rglob("*.py"))
    owners = {path: path.relative_to(root / PACKAGE).with_suffix("").parts[0] for path in files}
    known = {owner for owner in owners.values() if not owner.startswith("__")}
    problems = [f"ARCHITECTURE.md: {PACKAGE}/{name} is not in the list" for name in sorted(known - rank.keys())]
    for path, owner in owners.items():
        if owner not in rank:
            continue
        module = list(path.relative_to(root).parent.parts)
        for line, layer in imported_layers(path.read_text(encoding="utf-8"), module, known):
            if layer != owner and rank.get(layer, -1) > rank[owner]:
                problems.append(f"{path.relative_to(root)}:{line}: '{owner}' stands above '{layer}' and imports it")
    return problems


def main(root: Path) -> int:
    """Print the violations and return 1 if there are any."""
    problems = find_violations(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))
