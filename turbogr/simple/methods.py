"""All simple methods by name; each can be what a recipe trains (`model: ease`)."""

from __future__ import annotations

from turbogr.plugins import register
from turbogr.simple.ease import Ease, EaseRecency
from turbogr.simple.item_knn import ItemKnn
from turbogr.simple.method_settings import SECTIONS
from turbogr.simple.popular_items import PopularItems
from turbogr.simple.recent_items import RecentItems
from turbogr.simple.session_knn import SessionKnn
from turbogr.simple.simple_method import SimpleMethod
from turbogr.simple.skip_markov import SkipMarkov

_ALL = (PopularItems(), RecentItems(), ItemKnn(), SessionKnn(), SkipMarkov(), Ease(), EaseRecency())

METHODS: dict[str, SimpleMethod] = {method.name: method for method in _ALL}
"""Every method by its name, in the order in which they are shown."""

for _name, _method in METHODS.items():
    register("method", _name, config=SECTIONS.get(_name))(type(_method))
