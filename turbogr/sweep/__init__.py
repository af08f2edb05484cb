"""Many runs of recipes over a grid of settings: start them, go on after an interruption, compare what came out."""

from turbogr.sweep.grid import Cell, cells_of, parse_axis, parse_variant
from turbogr.sweep.place import misplaced
from turbogr.sweep.results import Comparison, compare
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
