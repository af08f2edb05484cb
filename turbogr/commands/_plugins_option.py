"""The option `--plugins`, which all commands share that may need a user's own code."""

from __future__ import annotations

import argparse

from turbogr.plugins import load_plugins


def add_plugins_option(parser: argparse.ArgumentParser) -> None:
    """Add `--plugins` to a command."""
    parser.add_argument(
        "--plugins",
        action="append",
        default=[],
        metavar="FILE",
        help="import this Python file or module, which registers components of your own; may be repeated",
    )


def load_given_plugins(args: argparse.Namespace) -> None:
    """Import what `--plugins` names."""
    load_plugins(args.plugins)


def plugins_arguments(args: argparse.Namespace) -> list[str]:
    """Return `--plugins` as it was given, for the command line of another process."""
    return [part for plugin in args.plugins for part in ("--plugins", plugin)]
