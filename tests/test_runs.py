from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import turbogr
from tests.stores import draw_histories, write_store
from turbogr import cli, machine, runs
from turbogr.config import Config, DataConfig, EvaluateConfig, LossConfig, ModelConfig, TrainConfig
from turbogr.data import store_copy
from turbogr.errors import Note, UserError
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.runs import MetricLog, RunFolder, load_model, metrics_of, open_run
from turbogr.training.run import train

CONFIG = Config(
    model=ModelConfig(dim=8, num_blocks=1, num_heads=1, max_len=8, num_time_buckets=8),
    loss=LossConfig(num_negatives=4),
    data=DataConfig(batch_size=16),
    evaluate=EvaluateConfig(ks=(5,), metric="hr@5", baselines=("popularity",)),
    train=TrainConfig(epochs=2, tensorboard=False),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    write_store(tmp_path / "data", draw_histories(1, 40, 12, shortest=4), 12)
    train(CONFIG, tmp_path / "data", tmp_path / "run")
    return tmp_path / "run"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_run_is_opened_with_all_that_belongs_to_it(run: Path) -> None:
    opened = open_run(run)
    assert (opened.store.num_items, len(opened.tables["item"]), opened.max_len) == (12, 12, 8)
    assert opened.split.rule == "leave-two-out"
    assert opened.checkpoint.which == "best"
    last = open_run(run, which="last").checkpoint
    assert (last.which, last.epoch) == ("last", 2)
    assert not any(parameter.requires_grad for parameter in opened.task.model.parameters())


def test_without_a_best_checkpoint_the_last_one_is_loaded(run: Path) -> None:
    (run / "checkpoints" / "best.json").unlink()
    assert load_model(run) is not None
    assert load_model(run).checkpoint == load_model(run, "last").checkpoint


def forget(run: Path) -> None:
    """Remove the run's own copy of its data."""
    shutil.rmtree(run / "data")


Damage = Callable[[Path], object]
MISTAKES: dict[str, tuple[Damage, str]] = {
    "no folder": (lambda run: run.rename(run.parent / "elsewhere"), r"run does not exist; name a folder that"),
    "no run.json": (lambda run: (run / "run.json").unlink(), r"is not a run folder \(it has no run\.json\)"),
    "no config": (lambda run: (run / "config.yaml").unlink(), r"is not a run folder \(it has no config\.yaml\)"),
    "run.json cut short": (lambda run: (run / "run.json").write_text("{"), r"run\.json is damaged"),
    "run.json is a list": (lambda run: (run / "run.json").write_text("[]"), r"run\.json is damaged: it must hold"),
    "no data": (lambda run: (forget(run), change(run / "run.json", data=None)), r"does not say where the store is"),
    "config is not YAML": (lambda run: (run / "config.yaml").write_text("a: ["), r"config\.yaml is damaged"),
    "config is a number": (lambda run: (run / "config.yaml").write_text("3"), r"config\.yaml is damaged"),
    "unknown setting": (lambda run: (run / "config.yaml").write_text("train: {epoch: 2}"), r"Did you mean 'epochs'"),
    "no store": (
        lambda run: (forget(run), (run.parent / "data").rename(run.parent / "moved")),
        r"does not exist, and has no copy of it; say where it is",
    ),
    "no checkpoint": (lambda run: (run / "checkpoints").rename(run / "gone"), r"has no checkpoint yet"),
    "best.json damaged": (lambda run: (run / "checkpoints" / "best.json").write_text("x"), r"best\.json is damaged"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_thing_that_can_be_wrong_has_its_message(run: Path, name: str) -> None:
    damage, message = MISTAKES[name]
    damage(run)
    with pytest.raises(UserError, match=message):
        open_run(run)


def test_a_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file, not a run folder"):
        RunFolder.open(tmp_path / "run")


def test_a_moved_store_is_found_and_another_one_is_refused(run: Path) -> None:
    moved = (run.parent / "data").rename(run.parent / "moved")
    assert RunFolder.open(run).store(moved).num_items == 12
    other = write_store(run.parent / "other", draw_histories(2, 40, 12), 12)
    with pytest.raises(UserError, match=r"other does not hold the data that .*run was trained on"):
        RunFolder.open(run).store(other.path)


def test_a_run_is_opened_without_its_original_data(run: Path, tmp_path: Path) -> None:
    wanted = [some.item_ids.tolist() for some in turbogr.load(run).recommend_batches(k=4)]
    measured = turbogr.evaluate(run)
    shutil.rmtree(run.parent / "data")
    elsewhere = tmp_path / "another" / "machine"
    shutil.move(run, elsewhere)
    assert open_run(elsewhere).store.path == elsewhere / "data"
    assert [some.item_ids.tolist() for some in turbogr.load(elsewhere).recommend_batches(k=4)] == wanted
    assert turbogr.evaluate(elsewhere) == measured
    assert cli.main(["recommend", str(elsewhere), "--out", str(tmp_path / "lists.csv")]) == 0
    assert cli.main(["evaluate", str(elsewhere)]) == 0


def test_the_original_data_is_preferred_and_its_copy_serves_when_it_has_changed(run: Path) -> None:
    original = run.parent / "data"
    assert RunFolder.open(run).store().path == original
    shutil.rmtree(original)
    write_store(original, draw_histories(2, 40, 12), 12)
    with pytest.warns(Note, match=r"data does not hold the data that .*the run's own copy"):
        assert RunFolder.open(run).store().path == run / "data"
    with pytest.raises(UserError, match=r"data does not hold the data that .*run was trained on"):
        RunFolder.open(run).store(original)


def test_a_copy_with_other_content_is_refused(run: Path) -> None:
    shutil.rmtree(run.parent / "data")
    items = run / "data" / "items.npy"
    content = bytearray(items.read_bytes())
    content[-4] ^= 1
    items.unlink()
    items.write_bytes(content)
    with pytest.raises(UserError, match=r"items\.npy is damaged: its content is not what was written"):
        open_run(run)
    forget(run)
    write_store(run / "data", draw_histories(2, 40, 12), 12)
    with pytest.raises(UserError, match=r"does not hold the data that"):
        open_run(run)


@pytest.mark.parametrize(
    ("when", "most", "copied"), [("auto", 10, False), ("always", 10, True), ("never", 10**9, False)]
)
def test_when_the_data_is_copied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
    most: int,
    copied: bool,
) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    monkeypatch.setattr(runs, "MOST_COPIED", most)
    write_store(tmp_path / "data", draw_histories(1, 40, 12, shortest=4), 12)
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, copy_data=when))
    train(config, tmp_path / "data", tmp_path / "run")
    assert (tmp_path / "run" / "data").exists() == copied
    said = "is not copied into" in capsys.readouterr().err
    assert said == (when == "auto"), "what is too large is never left out silently"


def test_a_copy_that_fails_does_not_fail_the_run(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    forget(run)
    monkeypatch.setattr(store_copy, "_link_or_copy", full)
    assert train(CONFIG, tmp_path / "data", run, resume=True).status == "finished"
    assert "could not be copied into" in capsys.readouterr().err
    assert not list(run.glob(".data*"))


def test_a_missing_number_of_items_is_reported(run: Path) -> None:
    folder = RunFolder.open(run)
    change(run / "run.json", data={**folder.data(), "num_items": None})
    with pytest.raises(UserError, match="does not say how many items"):
        load_model(run)


def test_metrics_are_described_by_the_record_first(run: Path) -> None:
    loss = MetricInfo("loss@5", "Loss at 5", higher_is_better=False)
    odd = [dataclasses.asdict(loss), {"name": "hr@5"}, 3, dataclasses.asdict(MetricInfo("unused", "Unused"))]
    change(run / "run.json", metrics=odd)
    described = RunFolder.open(run).describe_metrics(["mrr", "hr@5", "loss@5"])
    assert [info.title for info in described] == ["Loss at 5", "HR@5", "MRR"]
    change(run / "run.json", metrics="none")
    assert [info.title for info in RunFolder.open(run).describe_metrics(["mrr", "hr@5"])] == ["HR@5", "MRR"]


def test_the_log_of_a_resumed_run_counts_its_later_records(tmp_path: Path) -> None:
    lines = [
        '{"kind": "eval", "part": "test", "step": 4, "mrr": 0.1}',
        '{"kind": "train", "step": 8, "loss": 3}',
        '{"kind": "eval", "part": "valid", "step": 4, "mrr": 0.2}',
        "[]",
        '{"kind": "train", "step": 2, "loss": 4}',
        '{"kind": "train", "step": 8, "loss": 2}',
        '{"kind": "eval", "part": "test", "step": 4, "mrr": 0.3}',
        '{"kind": "train", "st',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    log = MetricLog.read(tmp_path)
    assert [(record["step"], record["loss"]) for record in log.training] == [(2, 4), (8, 2)]
    assert [(record["part"], record["mrr"]) for record in log.evaluations] == [("valid", 0.2), ("test", 0.3)]
    assert log.unreadable == [4, 8]
    assert MetricLog.read(tmp_path / "nothing") == MetricLog([], [], [])


def test_metrics_are_all_numbers_that_are_not_counts_or_times() -> None:
    record = {"kind": "eval", "step": 1, "part": "test", "epoch": 1.0, "num_users": 9, "elapsed": 2.0}
    record |= {"evaluation_seconds": 0.1, "auc": 0.7, "positives": 3, "ok": True, "text": "x", "bad": float("nan")}
    assert metrics_of(record) == {"auc": 0.7, "positives": 3.0}


def test_reading_a_run_folder_does_not_import_torch() -> None:
    code = "import sys, turbogr.runs, turbogr.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
