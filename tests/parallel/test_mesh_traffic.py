from __future__ import annotations

import numpy as np
import pytest

from turbogr.parallel.mesh_traffic import MeasuredLink, MeasuredLinks, RowTraffic, choose_groups, predicted_seconds

FAST, SLOW = MeasuredLink(1e-5, 1e10), MeasuredLink(1e-4, 1e8)
LINKS = MeasuredLinks(SLOW, FAST, SLOW)


def test_rows_are_counted_without_repetition() -> None:
    step = [np.array([1, 1, 2]), np.array([2, 3]), np.array([9]), np.array([9, 1])]
    assert RowTraffic.of_steps([step], per_machine=2) == RowTraffic(7 / 4, 5 / 2, 4)


def test_common_rows_make_a_table_per_machine_pay() -> None:
    same = RowTraffic(1000, 1000, 1000)
    flat, hierarchical = predicted_seconds(same, LINKS, 512, machines=2, per_machine=8)
    assert hierarchical < flat
    groups, reason = choose_groups(same, LINKS, 512, 2, 8)
    assert groups == 2 and "a table per machine" in reason and "12 %" in reason


def test_without_common_rows_one_table_for_all_is_faster() -> None:
    different = RowTraffic(1000, 2000, 4000)
    assert choose_groups(different, LINKS, 512, machines=2, per_machine=2)[0] == 1
    # One machine's ranks have nothing to gain either way.
    flat, hierarchical = predicted_seconds(different, LINKS, 512, machines=1, per_machine=2)
    assert hierarchical < flat, "inside alone, over the faster link"


@pytest.mark.parametrize("row_bytes", [64, 4096])
def test_bytes_are_counted_by_hand(row_bytes: int) -> None:
    free = MeasuredLink(0.0, 1.0)  # seconds are bytes
    flat, hierarchical = predicted_seconds(
        RowTraffic(10, 15, 25), MeasuredLinks(free, free, free), row_bytes, machines=2, per_machine=2
    )
    assert flat == pytest.approx(10 * 3 / 4 * (8 + 2 * row_bytes))
    assert hierarchical == pytest.approx(10 / 2 * (8 + 2 * row_bytes) + (15 + 25) / 2 / 2 * (8 + row_bytes))
