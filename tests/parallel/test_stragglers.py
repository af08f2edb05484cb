"""A real rank that is slowed down is named in the output, the records, the summary and the report."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.parallel.ranks import run_ranks
from tests.parallel.training import train_run
from tests.training.test_pipeline import sparse
from turbogr.config import Config
from turbogr.report.page import render
from turbogr.report.run_data import RunData
from turbogr.training import stragglers
from turbogr.training.step import Stepper


def train_with_a_slow_rank(config: Config, store: Path, out: Path) -> dict[str, Any]:
    compute = Stepper.compute

    def slow(self: Stepper, batch: Any, sets: Any, step: int) -> Any:
        time.sleep(0.5 if self.mesh.world.rank == 1 else 0.02)
        return compute(self, batch, sets, step)

    with mock.patch.object(Stepper, "compute", slow), mock.patch.multiple(stragglers, _STEPS=2, _SECONDS=0.0):
        return train_run(config, store, out)


def test_a_slowed_down_rank_is_named_everywhere(config: Config, store_path: Path, tmp_path: Path) -> None:
    config = sparse(config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=8, epochs=None))
    ends = run_ranks(2, train_with_a_slow_rank, config, store_path, tmp_path / "run")
    assert ends[0]["status"] == "finished", ends
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if record["kind"] == "stragglers"]
    (slow,) = record["ranks"]
    assert slow["rank"] == 1 and slow["slowdown"] > 1.5 and slow["share_of_waiting"] > 0.9
    assert record["speeds"][0] == 1.0 and record["speeds"][1] < 0.7
    del record["kind"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["stragglers"] == [record]
    assert "rank 1 took " in render(RunData.read(tmp_path / "run"))
