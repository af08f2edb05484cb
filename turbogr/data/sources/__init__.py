"""The kinds of input that `turbogr prepare` understands, by name."""

from __future__ import annotations

from collections.abc import Iterable

from turbogr.data.sources.block import OF_TEXT_FILES, Source
from turbogr.data.sources.delimited import CSV, TSV
from turbogr.data.sources.jsonl import JSONL
from turbogr.data.sources.parquet import PARQUET
from turbogr.data.sources.public import AMAZON, KUAIRAND, MOVIELENS, RECBOLE, SASREC
from turbogr.data.sources.synthetic import SYNTHETIC
from turbogr.errors import UserError, nearest

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (SYNTHETIC, CSV, TSV, PARQUET, JSONL, MOVIELENS, AMAZON, SASREC, RECBOLE, KUAIRAND)
}

_OF_EVERY_SOURCE = (
    "split",
    "min_user_events",
    "min_item_events",
    "duplicates",
    "ties",
    "extend",
    "overwrite",
    "threads",
    "progress",
)


def find_source(name: str) -> Source:
    """Return the source called `name`; raises UserError with the nearest name."""
    if name not in SOURCES:
        raise UserError(f"unknown source {name!r}: use one of {', '.join(SOURCES)}.{nearest(name, SOURCES)}")
    return SOURCES[name]


def check_options(source: Source, given: Iterable[str]) -> None:
    """Raise UserError for the first of the `given` options that means nothing to the source."""
    takes = (*source.takes, *source.extra)
    for name in given:
        if name not in takes:
            listed = ", ".join(_flag(option) for option in takes)
            hint = "" if name in _somebodys_options() else nearest(name, (*takes, *_OF_EVERY_SOURCE))
            raise UserError(
                f"{_flag(name)} is not an option of the source {source.name!r}, which takes {listed} beside the "
                f"options of every source.{hint}"
            )


def _somebodys_options() -> set[str]:
    return {*OF_TEXT_FILES, "log", *(name for source in SOURCES.values() for name in source.extra)}


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
