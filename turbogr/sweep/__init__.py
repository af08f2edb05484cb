"""Runs of recipes over a grid of settings: start them, resume them after an interruption, compare their results."""

from turbogr.sweep.grid import Cell, cells_of, parse_axis, parse_variant
from turbogr.sweep.results import Comparison, compare
from turbogr.sweep.run_folder import misplaced
from turbogr.sweep.runner import Outcome, check, sweep

__all__ = [
    "Cell",
    "Comparison",
    "Outcome",
    "cells_of",
    "check",
    "compare",
    "misplaced",
    "parse_axis",
    "parse_variant",
    "sweep",
]
