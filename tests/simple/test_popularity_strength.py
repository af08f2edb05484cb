"""How much popularity explains: between logs of chains and logs without any order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from turbogr.config import load_config
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.simple.popularity_strength import popularity_strength
from turbogr.training.run import _covering_length, resolve_against

MakeStore = Callable[..., Store]


def chains(num_items: int = 40) -> list[list[int]]:
    """Every item is followed by the next one."""
    return [[(first + step) % num_items for step in range(8)] for first in range(num_items)] * 3


def draws(num_items: int = 40) -> list[list[int]]:
    """Items are drawn by popularity alone, none twice."""
    shares = 1.0 / np.arange(1, num_items + 1)
    generator = np.random.default_rng(0)
    return [
        [int(item) for item in generator.choice(num_items, 8, replace=False, p=shares / shares.sum())]
        for _ in range(120)
    ]


def test_popularity_explains_little_of_chains_and_most_of_independent_draws(make_store: MakeStore) -> None:
    weak, strong = (make_store(histories, 40) for histories in (chains(), draws()))
    found = [popularity_strength(store, Split.of(store), seen_out=True) for store in (weak, strong)]
    assert found[0] is not None and found[1] is not None
    assert found[0] < 0.4 < 0.8 < found[1]


def test_it_decides_the_temperature_of_quickstart(make_store: MakeStore) -> None:
    weak, strong = (make_store(histories, 40) for histories in (chains(), draws()))
    sharp, soft = (resolve_against(load_config("quickstart", []), store) for store in (weak, strong))
    assert sharp.loss.temperature < soft.loss.temperature


def test_a_given_temperature_needs_no_measurement(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **options: object) -> float:
        raise AssertionError("measured")

    monkeypatch.setattr("turbogr.training.run.popularity_strength", never)
    store = make_store(chains(), 40)
    assert resolve_against(load_config("quickstart", ["loss.temperature=0.07"]), store).loss.temperature == 0.07


def test_the_covering_length_holds_the_share_and_no_shorter_one_does() -> None:
    generator = np.random.default_rng(1)
    for share in (0.5, 0.95, 1.0):
        lengths = generator.geometric(0.05, 200)
        found = _covering_length(lengths, share)
        held = [np.minimum(lengths, most).sum() / lengths.sum() for most in (found - 1, found)]
        assert held[0] < share <= held[1] + 1e-12
