"""`turbogr recipes`: list the installed recipes; print or copy one to change it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from turbogr.config import find_recipe, recipe_names, recipe_summary
from turbogr.errors import UserError
from turbogr.files import check_writable, replace_text


def add_parser(subparsers: Any) -> None:
    """Add `recipes` to the command line."""
    parser = subparsers.add_parser(
        "recipes",
        help="list the recipes; print or copy one",
        description="List the installed recipes, which `turbogr train NAME` and `turbogr sweep NAME ...` take by name. "
        "With a name, print that recipe, or copy it to a file of your own to change it.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which recipe; leave it out to list them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="copy the recipe to this file, e.g. mine.yaml")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if args.name is None:
        if args.out is not None:
            raise UserError(
                f"--out {args.out}: name the recipe to copy, e.g. turbogr recipes quickstart --out mine.yaml"
            )
        print(_listing())
        return 0
    text = find_recipe(args.name).read_text(encoding="utf-8")
    if args.out is None:
        print(text, end="")
    else:
        _copy(text, args.out)
    return 0


def _listing() -> str:
    names = recipe_names()
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {recipe_summary(name)}" for name in names]
    return "\n".join(
        [
            *lines,
            "",
            "turbogr train NAME --data DIR --out RUN      train one; --set section.key=value changes a setting",
            "turbogr recipes NAME --out mine.yaml         copy one to change it; then turbogr train mine.yaml ...",
        ]
    )


def _copy(text: str, target: Path) -> None:
    check_writable(target, "--out")
    if target.exists():
        raise UserError(f"--out {target} already exists; choose another name")
    replace_text(target, text, follow_link=True)
    print(f"Written to {target}. Train it with: turbogr train {target} --data DIR --out RUN", file=sys.stderr)
