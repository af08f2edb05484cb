"""The public data sets, with the counts that they are published with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turbogr.data.prepare.preparation import prepare
from turbogr.data.split import Split

pytestmark = pytest.mark.filterwarnings("ignore::turbogr.data.prepare.data_warnings.DataWarning")

EVERYTHING = {"feedback": "all", "min_user_events": 1, "min_item_events": 1}


@pytest.mark.parametrize(
    ("source", "folder", "options", "counts"),
    [
        ("movielens", "ml-1m", {}, (1_000_209, 6_040, 3_706)),
        ("kuairand", "kuairand-pure", EVERYTHING, (228_329, 25_156, 6_361)),
        ("amazon", "amazon-digital-music", {}, (145_523, 14_354, 10_027)),
        ("sasrec", "amazon-video-games", {}, (287_107, 31_013, 23_715)),
        ("p5", "p5-s3rec/Beauty.txt", {}, (198_502, 22_363, 12_101)),
        ("p5", "p5-s3rec/Toys_and_Games.txt", {}, (167_597, 19_412, 11_924)),
    ],
)
def test_counts(
    tmp_path: Path, real_data: Path, source: str, folder: str, options: dict[str, object], counts: tuple[int, int, int]
) -> None:
    store = prepare(source, [real_data / folder], tmp_path / "store", **options)  # type: ignore[arg-type]
    assert (store.num_events, store.num_users, store.num_items) == counts
    assert store.manifest.account == {"rows_in": counts[0], "rows_kept": counts[0], "dropped": {}}


def test_movielens_holds_out_the_last_item_of_every_user(tmp_path: Path, real_data: Path) -> None:
    store = prepare("movielens", [real_data / "ml-1m"], tmp_path / "store")
    last: dict[int, tuple[int, int]] = {}
    with open(real_data / "ml-1m" / "ratings.dat", encoding="utf-8") as file:
        for line in file:
            user, item, _, time = map(int, line.split("::"))
            if user not in last or time >= last[user][1]:
                last[user] = (item, time)
    split = Split.of(store)
    test = split.targets("test")
    users = store.user_ids.decode(np.arange(store.num_users)).tolist()
    held_out = zip(store.item_ids.decode(store.items[test]).tolist(), store.times[test].tolist(), strict=True)
    assert dict(zip(users, held_out, strict=True)) == last
    assert (split.train_end == test).all()


def test_kuairand_follows_the_published_protocol(tmp_path: Path, real_data: Path) -> None:
    store = prepare("kuairand", [real_data / "kuairand-pure"], tmp_path / "store")
    account = store.manifest.account
    assert account["rows_in"] == 228_329
    assert account["dropped"]["hated by the user"] == 190
    assert (store.num_events, store.num_users, store.num_items) == (63_724, 7_261, 2_233)
    assert np.diff(store.offsets).min() >= 5
    assert store.item_counts().min() >= 5
