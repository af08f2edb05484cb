"""`bench collisions`: counts checked by hand, and a run on a store."""

from __future__ import annotations

import pytest
import torch

from tests.training.conftest import write_store
from turbogr import bench
from turbogr.bench.collisions import Reads
from turbogr.errors import UserError


@pytest.mark.parametrize(("inputs", "rate"), [([3, 2, 3], 0.0), ([2, 0, 0], 1 / 3)])
def test_rows_and_gradients_are_counted(inputs: list[int], rate: float) -> None:
    reads = Reads(4)
    reads.add(torch.tensor([0, 1]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    reads.add(torch.tensor([0, 2, 3]), torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 0.0]]), torch.tensor(inputs))
    # row 0 is in both batches, the others in one; rows 0 and 2 have squared gradients of 25
    counted = {"alpha": 1.0, "alpha_eff": 0.75, "collision_rate": 1 / 3, "input_collision_rate": rate}
    assert reads.figures() == pytest.approx({**counted, "rows_per_batch": 2.5})


def test_a_store_is_measured(tmp_path) -> None:
    write_store(tmp_path / "store")
    record, result = bench.run_benchmark("collisions", [f"data={tmp_path / 'store'}", "steps=5"])
    assert 0.0 < record.figures["alpha_eff"] <= record.figures["alpha"] == 1.0
    assert 0.0 < record.figures["input_collision_rate"] < record.figures["collision_rate"] <= 1.0
    assert "5 batches of 16" in result.notes[0]


def test_a_store_is_required() -> None:
    with pytest.raises(UserError, match="--set data=DIR"):
        bench.run_benchmark("collisions", [])
