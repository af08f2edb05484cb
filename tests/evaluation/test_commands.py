"""`turbogr evaluate` and `turbogr recommend` on a really trained, tiny run."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from tests.stores import draw_histories, write_store
from turbogr import cli, machine, ops
from turbogr.api import evaluate as measure
from turbogr.commands.evaluate import metric_table
from turbogr.commands.recommend import read_users
from turbogr.config import Config, DataConfig, EvaluateConfig, LossConfig, ModelConfig, TrainConfig
from turbogr.data.prepare.item_table import add_item_info
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.evaluation import progress_lines
from turbogr.evaluation.evaluator import evaluate
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.evaluation.metrics import margin
from turbogr.evaluation.scorer import ModelScorer
from turbogr.evaluation.user_positions import Measured, UserPositions
from turbogr.recommend import load
from turbogr.runs import open_run
from turbogr.training.run import train

NUM_USERS, NUM_ITEMS = 180, 50
DEFAULTS = progress_lines.ProgressLines.__init__.__kwdefaults__
CONFIG = Config(
    model=ModelConfig(dim=16, num_blocks=1, num_heads=1, max_len=12, num_time_buckets=16),
    loss=LossConfig(num_negatives=8),
    data=DataConfig(batch_size=32),
    evaluate=EvaluateConfig(ks=(5, 10), metric="hr@10", baselines=("popularity", "markov")),
    train=TrainConfig(epochs=2, tensorboard=False),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("trained")
    write_store(folder / "data", draw_histories(1, NUM_USERS, NUM_ITEMS, shortest=2), NUM_ITEMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
        train(CONFIG, folder / "data", folder / "run")
        yield folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, for tests that write into the run folder."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_another_filter_leaves_the_run_as_it_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in run.iterdir())
    assert cli.main(["evaluate", str(run), "--filter-last", "2"]) == 0
    assert "without the user's last 2 earlier items" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "--filter-last", "2", "--json", str(tmp_path / "two.json")]) == 0
    assert sorted(path.name for path in run.iterdir()) == before
    opened = open_run(run)
    result = evaluate(ModelScorer(opened.encoder, 12), opened.store, opened.split, ks=(5, 10), filter_last=2)
    assert json.loads((tmp_path / "two.json").read_text())["parts"]["test"]["model"] == result.metrics
    huge = "9" * 20
    assert cli.main(["evaluate", str(run), "--filter-last", huge, "--json", str(tmp_path / "all.json")]) == 0
    everything = evaluate(ModelScorer(opened.encoder, 12), opened.store, opened.split, ks=(5, 10))
    assert json.loads((tmp_path / "all.json").read_text())["parts"]["test"]["model"] == everything.metrics
    assert cli.main(["evaluate", str(run), "--filter-last", "0"]) == 2
    assert "--filter-last is 0; give at least 1" in capsys.readouterr().err


def test_a_sample_of_users_in_a_recipe_and_on_the_command_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(run)]) == 0
    capsys.readouterr()
    everything = json.loads((run / "evaluation.json").read_text())
    assert "users" not in everything["rule"]
    out = tmp_path / "sample.json"
    assert cli.main(["evaluate", str(run), "--users", "30", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    sample = json.loads(out.read_text())
    assert sample["num_users"] == 30 and sample["rule"] == {**everything["rule"], "users": 30, "users_seed": 0}
    assert (
        f"a sample of 30 of the {everything['num_users']} users, drawn by their ids with seed 0" in sample["protocol"]
    )
    assert sample["protocol"] in printed and "±" in printed
    assert f"{everything['num_users'] - 30} users are not part of it: not in the sample." in printed
    assert json.loads((run / "evaluation.json").read_text()) == everything, "the run keeps its own protocol"
    assert measure(run, users=30).metrics == sample["parts"]["test"]["model"]

    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["evaluate"]["users"] = 30
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert cli.main(["evaluate", str(run)]) == 0
    record = json.loads((run / "evaluation.json").read_text())
    assert record.pop("coverage")["test"]["num_users"] == 30
    sample.pop("coverage")
    assert record == sample
    step = open_run(run).checkpoint.step
    by_user = UserPositions.read(run, "test", step)
    assert by_user is not None and len(by_user.users) == 30
    assert cli.main(["evaluate", str(run), "--users", "9999", "--json", str(out)]) == 0
    whole = json.loads(out.read_text())
    assert whole["parts"] == everything["parts"] and whole["protocol"] == everything["protocol"]
    assert cli.main(["evaluate", str(run), "--users", "0"]) == 2
    assert "--users is 0; give at least 1" in capsys.readouterr().err


def test_a_long_evaluation_says_how_far_it_is_without_a_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_lines.ProgressLines.__init__, "__kwdefaults__", {**DEFAULTS, "every": 0.0})
    assert cli.main(["evaluate", str(run)]) == 0
    printed = capsys.readouterr().err
    assert re.search(r"^evaluating: [\d,]+ of \d+ users, \d+ s so far", printed, re.MULTILINE)
    assert re.search(r"^measuring the baselines: \d+ s so far$", printed, re.MULTILINE)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_the_other_way_is_measured_without_training_and_leaves_the_run_as_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], filter_seen: bool
) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["evaluate"]["filter_seen"] = filter_seen
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    own, other = ("--exclude-seen", "--include-seen") if filter_seen else ("--include-seen", "--exclude-seen")
    before = sorted(path.name for path in run.iterdir())
    assert cli.main(["evaluate", str(run), other, "--json", str(tmp_path / "other.json")]) == 0
    assert ("earlier items included" in capsys.readouterr().out) == filter_seen
    assert sorted(path.name for path in run.iterdir()) == before
    found = json.loads((tmp_path / "other.json").read_text())
    opened = open_run(run)
    scorer = ModelScorer(opened.encoder, 12)
    wanted = evaluate(scorer, opened.store, opened.split, ks=(5, 10), filter_seen=not filter_seen)
    assert found["parts"]["test"]["model"] == wanted.metrics
    assert (
        found["parts"]["test"]["markov"]
        == opened.task.baselines(opened.store, opened.split, "test", filter_seen=not filter_seen)["markov"]
    )
    assert found["rule"]["filter_seen"] == (not filter_seen)

    assert cli.main(["evaluate", str(run), own]) == 0
    record = json.loads((run / "evaluation.json").read_text())
    assert record["parts"]["test"]["model"] != wanted.metrics
    assert record["parts_exclude_seen"]["test"]["model"] == wanted.metrics_exclude_seen
    assert record["parts_include_seen"]["test"]["model"] == wanted.metrics_include_seen
    assert record[f"parts{own.replace('-', '_')[1:]}"]["test"] == record["parts"]["test"]
    assert record[f"parts{other.replace('-', '_')[1:]}"]["test"] == found["parts"]["test"], "baselines too"
    settings["evaluate"]["filter_seen"] = not filter_seen  # as a resumed run may be changed
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert cli.main(["evaluate", str(run), "--part", "valid"]) == 0
    assert list(json.loads((run / "evaluation.json").read_text())["parts"]) == ["valid"], "no mixture of protocols"


def test_options_about_seen_items_that_contradict_each_other_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(run), "--include-seen", "--exclude-seen"]) == 2
    assert "not allowed with" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run), "--include-seen", "--filter-last", "2"]) == 2
    assert "--filter-last makes no sense for --include-seen" in capsys.readouterr().err
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["evaluate"]["filter_seen"] = False
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert cli.main(["evaluate", str(run), "--filter-last", "2"]) == 2
    assert "no sense for a run with evaluate.filter_seen=false" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run), "--filter-last", "2", "--exclude-seen"]) == 0


def test_evaluate_prints_and_writes_what_it_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["evaluate", str(run), "--json", str(tmp_path / "copy.json")]) == 0
    printed = capsys.readouterr().out
    record = json.loads((run / "evaluation.json").read_text())
    assert record == json.loads((tmp_path / "copy.json").read_text())
    opened = open_run(run)
    result = evaluate(ModelScorer(opened.encoder, 12), opened.store, opened.split, "test", ks=(5, 10))
    assert record["parts"]["test"]["model"] == result.metrics
    assert set(record["parts"]["test"]) == {"model", "popularity", "markov"}
    assert record["num_users"] == NUM_USERS
    assert record["selected_on"] == "valid hr@10"
    assert record["step"] == opened.checkpoint.step
    assert "leave-two-out" in record["protocol"]
    assert "chosen by its hr@10 on the validation items" in record["protocol"]
    assert record["protocol"] in printed
    row = next(line.split() for line in printed.splitlines() if line.startswith("hr@10"))
    systems = ("model", "popularity", "markov")
    assert row[1::3] == [f"{record['parts']['test'][name]['hr@10']:.4f}" for name in systems]
    errors = record["standard_errors"]["test"]
    assert errors["model"] == result.standard_errors
    assert row[3::3] == [f"{margin(errors[name]['hr@10'], NUM_USERS):.4f}" for name in systems]
    assert "± is a 95 % confidence interval" in printed
    by_user = UserPositions.read(run, "test", record["step"])
    assert by_user is not None and list(by_user.positions) == list(systems)
    assert np.array_equal(by_user.positions["model"], result.positions)
    covered = record["coverage"]["test"]
    assert covered["num_users"] == NUM_USERS and f"Coverage: {covered['num_shown']:,} of" in printed
    assert len(json.loads((run / "samples.json").read_text())["users"]) == 12


def test_many_systems_are_printed_in_blocks_that_fit() -> None:
    names = ["model", "popularity", "markov", "ease", "ease-recency", "item-knn", "skip-markov", "session-knn", "own"]
    measured = {name: Measured({"hr@10": 0.1, "auc": 0.5}, {"hr@10": 0.01}) for name in names}
    described = {name: MetricInfo(name, name) for name in ("hr@10", "auc")}
    table = metric_table("hstu", measured, described, 100, 80)
    assert max(map(len, table.splitlines())) <= 80
    heads = " ".join(block.splitlines()[0] for block in table.split("\n\n")).split()
    assert heads == ["hstu", *names[1:]]
    assert table.count("0.1000 ± 0.0196") == table.count("0.5000") == len(names)
    assert len(metric_table("hstu", measured, described, 100, 400).splitlines()) == 3


def test_evaluate_keeps_the_other_part_of_the_same_checkpoint_only(run: Path, capsys: pytest.CaptureFixture) -> None:
    short = sum(length < 3 for length in np.diff(open_run(run).store.offsets))
    assert cli.main(["evaluate", str(run), "--part", "valid"]) == 0
    valid = json.loads((run / "evaluation.json").read_text())
    assert valid["skipped"] == {"no valid event": short}
    assert "the validation item is ranked" in valid["protocol"]
    assert "on these same held-out items" in valid["protocol"]
    assert f"{short} users are not part of it: no valid event" in capsys.readouterr().out

    assert cli.main(["evaluate", str(run), "--batch-size", "1"]) == 0
    test = json.loads((run / "evaluation.json").read_text())
    assert test["parts"]["valid"] == valid["parts"]["valid"]
    assert "the test item is ranked" in test["protocol"]
    assert cli.main(["evaluate", str(run), "--part", "valid", "--batch-size", "1000"]) == 0
    record = json.loads((run / "evaluation.json").read_text())
    assert record == test, "the same numbers for any batch size, headed by the test part"

    assert record["rule"] == {"ks": [5, 10], "filter_seen": True, "repeated": "missed"}
    old = {key: value for key, value in record.items() if key != "rule"} | {"repeated": "missed"}  # as 0.1.0 wrote it
    (run / "evaluation.json").write_text(json.dumps(old))
    assert cli.main(["evaluate", str(run), "--part", "valid"]) == 0
    assert json.loads((run / "evaluation.json").read_text()) == record

    older = {key: value for key, value in record.items() if key != "rule"}
    (run / "evaluation.json").write_text(json.dumps(older))
    assert cli.main(["evaluate", str(run), "--part", "valid"]) == 0
    assert list(json.loads((run / "evaluation.json").read_text())["parts"]) == ["valid"], "test is by another rule"

    (run / "evaluation.json").write_text(json.dumps({**record, "step": 10**6}))
    assert cli.main(["evaluate", str(run), "--which", "last"]) == 0
    record = json.loads((run / "evaluation.json").read_text())
    assert list(record["parts"]) == ["test"]
    assert record["selected_on"] is None
    assert "the last one" in record["protocol"]


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_recommend_writes_every_user_in_every_format(trained: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"lists.{ending}"
    assert cli.main(["recommend", str(trained), "--k", "4", "--out", str(out)]) == 0
    rows: list[dict[str, object]]
    if ending == "parquet":
        rows = pq.read_table(out).to_pylist()
    elif ending == "csv":
        assert out.read_text().startswith('user_id,item_id,rank,score\n100,"item-0')
        with out.open(newline="") as file:
            rows = [
                {**row, "user_id": int(row["user_id"]), "rank": int(row["rank"]), "score": float(row["score"])}
                for row in csv.DictReader(file)
            ]
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = [
        {"user_id": int(user), "item_id": item, "rank": int(rank), "score": pytest.approx(float(score), rel=1e-6)}
        for some in load(trained).recommend_batches(k=4)
        for user, item, rank, score in zip(some.user_ids, some.item_ids, some.positions, some.scores, strict=True)
    ]
    assert len(rows) == 4 * NUM_USERS
    assert rows == wanted
    assert list(tmp_path.iterdir()) == [out], "nothing else is left beside the file"


def test_recommend_for_the_users_of_a_file(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    users, out = tmp_path / "users.txt", tmp_path / "lists.csv"
    users.write_text("105\n\n130\n105\n")
    assert cli.main(["recommend", str(trained), "--users", str(users), "--out", str(out), "--include-seen"]) == 0
    assert "1 users are in" in capsys.readouterr().err
    with out.open(newline="") as file:
        assert [row["user_id"] for row in csv.DictReader(file)] == ["105"] * 10 + ["130"] * 10

    users.write_text("105\n7\n8\n")
    before = out.read_bytes()
    command = ["recommend", str(trained), "--users", str(users), "--out", str(out)]
    assert cli.main(command) == 2
    assert "2 of 3 users are not in" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert cli.main([*command, "--skip-unknown"]) == 0
    assert "they are left out" in capsys.readouterr().err
    with out.open(newline="") as file:
        assert {row["user_id"] for row in csv.DictReader(file)} == {"105"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "lists.xlsx"], "choose from .parquet, .csv, .jsonl"),
        (["--out", "lists.csv", "--k", "0"], "--k is 0"),
        (["--out", "lists.csv", "--batch-size", "0"], "--batch-size is 0"),
        (["--out", "lists.csv", "--at", "tomorrow"], "cannot read 'tomorrow' as a time"),
        (["--out", "lists.csv", "--at", "0"], "before the last event of user"),
        (["--out", "nowhere/lists.csv"], "--out nowhere/lists.csv: the folder nowhere does not exist"),
        (["--out", "lists.csv", "--users", "u1,u2"], "--users u1,u2: there is no such file; it is a file of user ids"),
        (["--out", "lists.csv", "-k", "0"], "--k is 0"),
        (["--out", "lists.csv", "--data", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_reported_in_one_sentence_and_write_nothing(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recommend", str(trained), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("recommend", "--out", "lists.csv"), ("evaluate", "--json", "result.json")])
def test_a_target_without_a_folder_is_refused_before_the_model_is_loaded(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    command: tuple[str, ...],
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("turbogr.runs._load", refuse)
    name, option, file = command
    assert cli.main([name, str(trained), option, str(tmp_path / "nowhere" / file)]) == 2
    assert (
        f"{option} {tmp_path}/nowhere/{file}: the folder {tmp_path}/nowhere does not exist" in capsys.readouterr().err
    )
    (tmp_path / file).mkdir()
    assert cli.main([name, str(trained), option, str(tmp_path / file)]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / file).rmdir()
    os.mkfifo(tmp_path / file)
    assert cli.main([name, str(trained), option, str(tmp_path / file)]) == 2
    assert f"{option} {tmp_path}/{file} is a pipe and cannot be replaced by a file" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / file).stat().st_mode)


@pytest.mark.parametrize("name", ["evaluation.json", "samples.json"])
def test_a_pipe_in_the_run_folder_is_refused_before_the_work(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("the run is measured")

    monkeypatch.setattr("turbogr.evaluation.evaluator.evaluate", refuse)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert cli.main(["evaluate", str(run)]) == 2
    assert f"the result {run}/{name} is a pipe" in capsys.readouterr().err
    assert stat.S_ISFIFO((run / name).stat().st_mode)


def test_users_who_have_seen_everything_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    histories = [*draw_histories(3, 40, 12, shortest=3), list(range(12)), list(range(12))]
    complete = sum(len(set(history)) == 12 for history in histories)
    write_store(tmp_path / "data", histories, 12)
    train(CONFIG, tmp_path / "data", tmp_path / "run")
    capsys.readouterr()
    command = ["recommend", str(tmp_path / "run"), "--out", str(tmp_path / "lists.jsonl")]
    assert cli.main(command) == 0
    assert f"\n{complete} users have no row: they have seen every item" in capsys.readouterr().err
    assert cli.main([*command, "--include-seen"]) == 0
    assert "no row" not in capsys.readouterr().err


@pytest.mark.parametrize("filter_seen", [True, False])
def test_recommend_delivers_what_was_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, filter_seen: bool
) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["evaluate"]["filter_seen"] = filter_seen
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    store = open_run(run).store
    had = {100 + user: set(_items_of(store, user)) for user in range(NUM_USERS)}

    def seen_in_lists(*options: str) -> bool:
        out = tmp_path / "lists.jsonl"
        assert cli.main(["recommend", str(run), "--k", "20", "--out", str(out), *options]) == 0
        rows = map(json.loads, out.read_text().splitlines())
        return any(row["item_id"] in had[row["user_id"]] for row in rows)

    assert load(run).filter_seen == filter_seen
    assert seen_in_lists() == (not filter_seen)
    assert seen_in_lists("--include-seen")
    assert not seen_in_lists("--exclude-seen")
    assert cli.main(["recommend", str(run), "--out", "x.csv", "--include-seen", "--exclude-seen"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def _items_of(store: Store, user: int) -> list[str]:
    return [f"item-{item:03d}" for item in store.items[store.offsets[user] : store.offsets[user + 1]]]


@pytest.mark.parametrize("name", ["reference", "auto"])
def test_a_run_is_opened_with_the_backend_it_was_trained_with(run: Path, name: str) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"]["backend"] = name
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with ops.backend("reference" if name == "auto" else "auto"):
        open_run(run)
        served = ops.services(torch.device("cpu"))
    assert ({service.why for service in served} == {"chosen by name"}) == (name == "reference")
    assert name == "auto" or {service.backend for service in served} == {"reference"}


def test_a_store_that_moved_is_found_again_and_another_one_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    record = json.loads((run / "run.json").read_text())
    home = Path(record["data"]["path"])
    shutil.copytree(home, tmp_path / "moved")
    shutil.rmtree(run / "data")  # the run's own copy
    record["data"]["path"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(record))
    assert cli.main(["evaluate", str(run)]) == 2
    assert "--data DIR" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run), "--data", str(tmp_path / "moved")]) == 0
    other = write_store(tmp_path / "other", draw_histories(2, NUM_USERS, NUM_ITEMS), NUM_ITEMS)
    assert isinstance(other, Store)
    with pytest.raises(UserError, match=r"does not hold the data that .* was trained on"):
        load(run, data=other.path)
    assert cli.main(["evaluate", str(tmp_path / "nothing")]) == 2
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_loading_serves_a_user_who_was_never_seen(trained: Path) -> None:
    recommender = load(trained)
    start = 1_700_000_000
    (found,) = recommender.recommend([[("item-003", start), ("item-004", start + 60), ("item-005", start + 120)]], k=5)
    assert len(found) == 5
    assert not {"item-003", "item-004", "item-005"} & {item for item, _ in found}


def test_terminating_leaves_the_old_file(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "lists.jsonl"
    out.write_text("old")
    # Slow the model down so that the signal comes in the middle.
    script = (
        "import sys, time\n"
        "from turbogr import cli\n"
        "from turbogr.models.table_encoder import TableEncoder\n"
        "encode = TableEncoder.encode_last\n"
        "def slow(self, batch):\n"
        "    print('started', flush=True)\n"
        "    time.sleep(0.5)\n"
        "    return encode(self, batch)\n"
        "TableEncoder.encode_last = slow\n"
        f"sys.exit(cli.main(['recommend', {str(trained)!r}, '--out', {str(out)!r}, '--batch-size', '1']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("started")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert time.monotonic() - started < 10
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_files_of_users(tmp_path: Path) -> None:
    def file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        return tmp_path / name

    assert read_users(file("a.txt", "7\n\n  x y \n")) == ["7", "x y"]
    assert read_users(file("b.csv", 'age,User_ID\n3,u1\n4,"u,2"\n')) == ["u1", "u,2"]
    assert read_users(file("c.csv", "who\nu1\nu2\n")) == ["u1", "u2"]
    assert read_users(file("d.tsv", "who\tage\nu1\t3\n"), "who") == ["u1"]
    pq.write_table(pa.table({"user_id": [3, 1], "age": [4, 5]}), tmp_path / "e.parquet")
    assert read_users(tmp_path / "e.parquet") == [3, 1]
    assert read_users(file("l.csv", "user;age\nu1;3\n")) == ["u1"], "as spreadsheets with decimal commas write it"
    with pytest.raises(UserError, match="Did you mean 'user_id'"):
        read_users(tmp_path / "e.parquet", "userid")
    with pytest.raises(UserError, match=r"--user-column\. Columns: who, age"):
        read_users(file("f.csv", "who,age\nu1,3\n"))
    with pytest.raises(UserError, match="row 2 has no user id"):
        read_users(file("g.csv", "user_id,age\nu1,3\n,4\n"))
    with pytest.raises(UserError, match="has no user in it"):
        read_users(file("h.csv", ""))
    with pytest.raises(UserError, match="has no user in it"):
        read_users(file("i.txt", "\n"))
    with pytest.raises(UserError, match="one id per line"):
        read_users(file("j.txt", "u1\n"), "who")
    with pytest.raises(UserError, match="cannot read the users of"):
        read_users(file("k.parquet", "not parquet"))


def test_recommendations_have_titles_where_the_store_has_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    store = open_run(run).store
    ids = store.item_ids.decode(np.arange(0, NUM_ITEMS, 2)).tolist()
    info = add_item_info(store, pa.table({"item": ids, "title": [f"The {item}, <b>" for item in ids]}))
    try:
        for name in ("lists.csv", "lists.parquet", "lists.jsonl"):
            assert cli.main(["recommend", str(run), "--k", "3", "--out", str(tmp_path / name)]) == 0
        out = capsys.readouterr().out
        assert out.count("for example user ") == 3 and ", <b>" in out
        table = pq.read_table(tmp_path / "lists.parquet").to_pylist()
        assert [row["title"] for row in table] == info.titles_of([row["item_id"] for row in table])
        assert {row["title"] is None for row in table} == {True, False}
        rows = list(csv.DictReader((tmp_path / "lists.csv").open(newline="")))
        assert [row["title"] or None for row in rows] == [row["title"] for row in table]
        lines = [json.loads(line) for line in (tmp_path / "lists.jsonl").read_text().splitlines()]
        assert [line["title"] for line in lines] == [row["title"] for row in table]
        recommender = load(run)
        assert recommender.titles([ids[0], "nothing"]) == [f"The {ids[0]}, <b>", None]
        assert cli.main(["evaluate", str(run)]) == 0
        users = json.loads((run / "samples.json").read_text())["users"]
        assert any("target_title" in user for user in users)
        shown = [entry for user in users for entry in (*user["history"], *user["recommendations"])]
        assert [entry.get("title") for entry in shown] == info.titles_of([entry["item"] for entry in shown])
    finally:
        info.path.unlink()
    assert load(run).titles(ids[:1]) == [None]


def test_recommendations_may_have_any_column_of_the_items(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    store = open_run(run).store
    ids = store.item_ids.decode(np.arange(NUM_ITEMS)).tolist()
    table = {"item": ids, "title": [f"The {item}" for item in ids], "tags": [[item, "x"] for item in ids]}
    command = ["recommend", str(run), "--k", "2", "--item-columns", "tags,price"]
    assert cli.main([*command, "--out", str(tmp_path / "lists.csv")]) == 2
    assert "has no columns about its items, such as 'tags'; `turbogr item-info` adds them" in capsys.readouterr().err
    info = add_item_info(store, pa.table({**table, "price": np.arange(NUM_ITEMS) / 2}))
    try:
        for name in ("lists.csv", "lists.parquet", "lists.jsonl"):
            assert cli.main([*command, "--out", str(tmp_path / name)]) == 0
        found = pq.read_table(tmp_path / "lists.parquet").to_pylist()
        assert list(found[0]) == ["user_id", "item_id", "rank", "score", "title", "tags", "price"]
        assert all(
            (row["tags"], row["price"]) == (f"{row['item_id']}, x", ids.index(row["item_id"]) / 2) for row in found
        )
        rows = list(csv.DictReader((tmp_path / "lists.csv").open(newline="")))
        assert [(row["tags"], float(row["price"])) for row in rows] == [(row["tags"], row["price"]) for row in found]
        lines = [json.loads(line) for line in (tmp_path / "lists.jsonl").read_text().splitlines()]
        assert [line["price"] for line in lines] == [row["price"] for row in found]
        recommender = load(run)
        users = recommender.store.user_ids.decode(np.arange(2)).tolist()
        frame = recommender.recommend(users, k=2, output="pandas", item_columns=["price"])
        assert frame["price"].tolist() == [ids.index(item) / 2 for item in frame["item_id"]]
        with pytest.raises(
            UserError, match=r"columns of a table, and this call returns lists; ask for output='pandas'"
        ):
            recommender.recommend(users, item_columns=["price"])
        with pytest.raises(UserError, match="Did you mean 'price'"):
            recommender.recommend(users, output="arrow", item_columns="prize")
        assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
        users = json.loads((run / "samples.json").read_text())["users"]
        page = (tmp_path / "page.html").read_text()
        assert all(f"<small>{user['target']}, x</small>" in page for user in users)
        assert all(f"<small>{entry['item']}, x</small>" in page for user in users for entry in user["recommendations"])
    finally:
        info.path.unlink()


def test_histories_and_filters_from_files(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recommender = load(trained)
    ids = recommender.store.item_ids.decode(np.arange(6)).tolist()
    histories = {"new": [ids[0], ids[1]], "007": [ids[2], ids[3]]}
    wanted = recommender.recommend(histories, k=3, include=ids + ids[:0], exclude=ids[4:5], filter_seen=False)
    events = [(user, item) for user, items in histories.items() for item in items]
    (tmp_path / "h.csv").write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in events))
    (tmp_path / "h.tsv").write_text("user\titem\n" + "".join(f"{user}\t{item}\n" for user, item in events))
    (tmp_path / "h.jsonl").write_text("".join(json.dumps({"user": u, "item": i}) + "\n" for u, i in events))
    pq.write_table(pa.table({"user": [u for u, _ in events], "item": [i for _, i in events]}), tmp_path / "h.parquet")
    (tmp_path / "include.txt").write_text("".join(f"{item}\n" for item in ids))
    (tmp_path / "exclude.csv").write_text(f"item_id,why\n{ids[4]},sold out\n")
    for name in ("h.csv", "h.tsv", "h.jsonl", "h.parquet"):
        out = tmp_path / "lists.parquet"
        arguments = ["recommend", str(trained), "--out", str(out), "--k", "3", "--include-seen"]
        arguments += ["--histories", str(tmp_path / name), "--include-items", str(tmp_path / "include.txt")]
        assert cli.main([*arguments, "--exclude-items", str(tmp_path / "exclude.csv")]) == 0
        table = pq.read_table(out).to_pydict()
        assert table["user_id"] == [user for user in histories for _ in range(3)], name
        assert table["item_id"] == [item for ranked in wanted.values() for item, _ in ranked], name
    capsys.readouterr()


def test_mistakes_in_files_of_histories_and_items(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "h.csv").write_text("user,item\n1,2\n")
    (tmp_path / "empty.csv").write_text("user,item\n")
    (tmp_path / "items.csv").write_text("a,b\n1,2\n")
    mistakes = {
        ("--histories", "h.xlsx"): "has the ending '.xlsx'; choose from .csv",
        ("--histories", "none.csv"): "does not exist; check the path",
        ("--histories", "empty.csv"): "holds no records",
        ("--histories", "h.csv", "--users", "u.txt"): "leave one of them out",
        ("--histories", "h.csv", "--user-column", "who"): "has no column 'who' (--user-column)",
        ("--histories", "h.csv", "--out", str(tmp_path / "h.csv")): "would replace the file that --histories reads",
        ("--include-items", "items.csv"): "which column of",
        ("--exclude-items", "items.csv", "--item-column", "c"): "has no column 'c'",
        ("--include-items", "none.txt"): "does not exist",
    }
    for (option, name, *more), message in mistakes.items():
        out = str(tmp_path / "lists.csv")
        assert cli.main(["recommend", str(trained), "--out", out, option, str(tmp_path / name), *more]) == 2
        assert message in capsys.readouterr().err, option


@pytest.mark.parametrize("option", ["--include-seen", "--exclude-seen"])
def test_ranks_are_started_with_the_same_protocol(trained: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("turbogr.parallel.launch.launch", lambda command, ranks: started.append(command) or 0)
    assert cli.main(["evaluate", str(trained), "--ranks", "2", option]) == 0
    assert [part for part in started[0] if part.endswith("-seen")] == [option]
