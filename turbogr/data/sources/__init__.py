"""The kinds of input that `turbogr prepare` understands, by name."""

from __future__ import annotations

from turbogr.data.sources.block import Source
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


def find_source(name: str) -> Source:
    """Return the source called `name`; raises UserError with the nearest name."""
    if name not in SOURCES:
        raise UserError(f"unknown source {name!r}: use one of {', '.join(SOURCES)}.{nearest(name, SOURCES)}")
    return SOURCES[name]
