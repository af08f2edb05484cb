"""A run may change its number of ranks wherever it stopped: same tensors, no sample lost or repeated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.training import load_and_finish_epoch, load_state, save_after, save_with_past_tables, train_run
from turbogr.api import evaluate
from turbogr.config import Config, load_config
from turbogr.runs import load_model


@pytest.fixture(scope="module")
def few(store_path: Path) -> Config:
    from tests.training.conftest import make_config

    config = make_config()
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=8))


def _on(size: int, function: Any, *args: Any) -> list[Any]:
    return run_ranks(size, function, *args) if size > 1 else [function(*args)]


@pytest.mark.parametrize("saved", [(1, 1), (1, 4), (2, 2)])
def test_a_checkpoint_of_any_mesh_loads_on_any_other(
    saved: tuple[int, int], few: Config, store_path: Path, tmp_path: Path
) -> None:
    groups, members = saved
    state = _on(groups * members, save_after, few, store_path, tmp_path, groups, 3)[0]
    finished = []
    for loading_groups, loading_members in ((1, 1), (1, 2), (2, 1), (2, 2)):
        size = loading_groups * loading_members
        found = _on(size, load_and_finish_epoch, few, store_path, tmp_path, loading_groups)
        for result in found:
            assert result["state"].keys() == state.keys()
            for name, tensor in state.items():
                assert np.array_equal(result["state"][name], tensor), name
        finished.append((np.sort(np.concatenate([result["seen"] for result in found])), found[0]))
    for seen, result in finished:
        assert np.array_equal(seen, finished[0][0]), "every event of the rest of the epoch comes once"
        assert result["loss"] == pytest.approx(finished[0][1]["loss"], rel=1e-5)
        np.testing.assert_allclose(result["dense"], finished[0][1]["dense"], rtol=1e-5, atol=3e-6)


def test_past_tables_and_hard_lists_load_on_any_mesh(few: Config, store_path: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(
        few,
        pipeline=dataclasses.replace(few.pipeline, mode="semi_async", staleness=2),
        loss=dataclasses.replace(few.loss, sampler="mixture", shares=(0.5, 0.0, 0.0, 0.5), num_negatives=8),
    )
    run_ranks(2, save_with_past_tables, config, store_path, tmp_path, 1, 3)
    state = load_state(config, store_path, tmp_path, 1)
    assert {name.split(".")[0] for name in state} == {"model", "tables", "dense_optimizer", "task", "past_tables"}
    assert np.array_equal(state["past_tables.missing_2.item"], 0.5 * state["tables.item.weight"])
    assert np.array_equal(state["past_tables.missing_1.item"], 0.75 * state["tables.item.weight"])
    for groups in (1, 4):
        for found in run_ranks(4, load_state, config, store_path, tmp_path, groups):
            assert found.keys() == state.keys()
            for name, tensor in state.items():
                assert np.array_equal(found[name], tensor), (groups, name)


def test_a_signal_on_one_rank_stops_all_at_the_same_step_and_one_process_continues(
    few: Config, store_path: Path, tmp_path: Path
) -> None:
    straight = train_run(few, store_path, tmp_path / "straight")
    stopped = run_ranks(2, train_run, few, store_path, tmp_path / "run", 1)
    assert [(end["status"], end["signal"]) for end in stopped] == [("interrupted", 15)] * 2
    assert stopped[0]["step"] == stopped[1]["step"] <= 4
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "interrupted"
    measured = load_config(tmp_path / "run/config.yaml").parallel.cost
    ended = train_run(few, store_path, tmp_path / "run", resume=True)
    assert ended["status"] == "finished" and ended["step"] == straight["step"]
    assert load_config(tmp_path / "run/config.yaml").parallel.cost == measured is not None
    assert load_config(tmp_path / "straight/config.yaml").parallel.cost is None, "one rank has nothing to balance"
    one, many = (load_model(tmp_path / name, "last") for name in ("straight", "run"))
    np.testing.assert_allclose(many.tables["item"].numpy(), one.tables["item"].numpy(), rtol=1e-4, atol=1e-5)


def test_a_run_of_two_ranks_measures_the_same_as_one_of_one(few: Config, store_path: Path, tmp_path: Path) -> None:
    one = train_run(few, store_path, tmp_path / "one")
    two = run_ranks(2, train_run, few, store_path, tmp_path / "two")
    assert two[0] == two[1] and two[0]["status"] == "finished"
    assert two[0]["best"] == one["best"], "ranks of items are the same where no two scores are within rounding"
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for alone, together in zip(*records, strict=True):
        assert alone["kind"] == together["kind"] and alone["step"] == together["step"]
        for name in ("loss", "grad_norm") if alone["kind"] == "train" else ("hr@10", "ndcg@10", "mrr"):
            assert together[name] == pytest.approx(alone[name], rel=1e-5), name
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    assert evaluate(tmp_path / "two").metrics.items() <= summary["metrics"].items()
    ranks = json.loads((tmp_path / "two/environment.json").read_text())["ranks"]
    assert (ranks["size"], ranks["groups"], ranks["members"], ranks["balance"]) == (2, 1, 2, "reallocate")
