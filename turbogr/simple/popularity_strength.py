"""How much of what can be predicted popularity alone explains: a statistic of a log that decides settings."""

from __future__ import annotations

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.simple.methods import METHODS
from turbogr.simple.selection import choose_methods

_METHODS = ("popularity", "skip-markov")


def popularity_strength(store: Store, split: Split, *, seen_out: bool) -> float | None:
    """Return the criterion of the most popular items as a share of that of a Markov chain over skips.

    Both are fitted with their usual settings and measured on the validation items, or on the last training items where
    there are none. None: there is nothing to measure on, or the log is too large for the chain.
    """
    usual = {
        name: {key: values[0] for key, values in METHODS[name].choices(store.num_items).items()} for name in _METHODS
    }
    found = choose_methods(store, split, seen_out=seen_out, names=_METHODS, fixed=usual).methods
    if set(found) != set(_METHODS):
        return None
    popular, chain = (found[name].value for name in _METHODS)
    return popular / chain if chain > 0 else None
