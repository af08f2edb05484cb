"""What `prepare` and `inspect` print of a store's features and actions."""

from __future__ import annotations

from turbogr.data.feature_columns import FeatureColumn
from turbogr.data.item_info import ItemAccount, describe_account
from turbogr.data.store import Store
from turbogr.errors import one_line

_TITLES = {"action": "actions to predict", "event": "event features", "item": "item features", "user": "user features"}


def describe_features(store: Store) -> list[str]:
    """Return the actions and features of a store and what became of the records of their tables, as lines of text."""
    lines = []
    for owner, title in _TITLES.items():
        columns = [column for column in store.features.values() if column.owner == owner]
        if columns:
            lines.append(f"{title}: " + ", ".join(_described(column, store) for column in columns))
    tables = ("item_features", "item"), ("user_features", "user"), ("item_vectors", "item")
    for name, owner in tables:
        record = store.manifest.settings.get(name)
        if record is None:
            continue
        account = ItemAccount(**{field: record[field] for field in ItemAccount.__dataclass_fields__})
        lines.append(f"{name.replace('_', ' ')} from {one_line(record['source'])}: ids from {record['id']!r}")
        lines += describe_account(account, owner)
    return lines


def _described(column: FeatureColumn, store: Store) -> str:
    info = column.info
    rows = {"item": store.num_items, "user": store.num_users}.get(column.owner, store.num_events)
    said = {
        "binary": f"{info.mean:.2%} positive",
        "number": f"{info.low:g} to {info.high:g}{', log scale' if info.log else ''}",
        "category": f"{info.size:,} categories",
        "categories": f"{info.size:,} categories, several each",
        "vector": f"vectors of {info.size:,}",
    }[info.kind]
    missing = f", {info.missing / rows:.1%} without" if info.missing else ""
    return f"{one_line(column.name)} ({said}{missing})"
