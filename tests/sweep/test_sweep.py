"""turbogr sweep: the grid, real runs that are resumed and repeated, and what is made of them."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked_training import fork_training, forked_training
from tests.stores import draw_histories, write_store
from turbogr.cli import main
from turbogr.errors import UserError
from turbogr.evaluation.metric_info import MetricInfo
from turbogr.evaluation.metrics import describe_metric, describe_metrics
from turbogr.sweep import Comparison, cells_of, compare, parse_axis, parse_variant, runner
from turbogr.sweep.results import RunResult

__all__ = ["forked_training"]
pytestmark = pytest.mark.usefixtures("forked_training")

HR = describe_metric("hr@10")
RECIPE = """
model: {name: sasrec, dim: 8, num_blocks: 1, num_heads: 1, max_len: 16}
loss: {num_negatives: 4}
data: {batch_size: 16, split: leave-two-out}
evaluate: {metric: ndcg@10, every: 1, baselines: [popularity, markov]}
train: {epochs: 2, seed: 0, tensorboard: false, profile: false}
"""


def grid(*axes):
    return [parse_axis(axis) for axis in axes]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "store"
    write_store(path, draw_histories(0, 60, 20, shortest=4), 20)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """Finished sweeps that tests copy: `seeds` with --grid train.seed=0,1 and `alone` without a grid."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fork_training(monkeypatch)
        assert sweep(folder / "tiny.yaml", data, folder / "seeds", "--grid", "train.seed=0,1", "--jobs", "2") == 0
        assert sweep(folder / "tiny.yaml", data, folder / "alone") == 0
    return folder


def copied(trained, run, out):
    """Give a sweep's folder a finished run of `trained`."""
    shutil.copytree(trained / run, out / Path(run).relative_to(Path(run).parts[0]))


def test_the_last_axis_changes_fastest_and_names_are_short():
    cells = cells_of(["a/hstu.yaml", "a/fuxi.yaml"], grid("model.dropout=0.1,0.2", "train.seed=0,1"))
    assert [cell.name for cell in cells[:3]] == ["hstu/dropout=0.1,seed=0", "hstu/dropout=0.1,seed=1",
                                                 "hstu/dropout=0.2,seed=0"]  # fmt: skip
    assert len(cells) == 8 and cells[4].recipe.stem == "fuxi"
    assert cells[1].overrides == ["model.dropout=0.1", "train.seed=1"]
    assert cells[0].group == cells[1].group == ("hstu", "dropout=0.1") != cells[2].group


def test_keys_that_end_alike_keep_their_sections():
    (cell,) = cells_of(["r.yaml"], grid("model.name=hstu", "loss.name=full"))
    assert cell.name == "r/model.name=hstu,loss.name=full"


def test_a_recipe_alone_is_a_sweep_of_one():
    (cell,) = cells_of(["r.yaml"], [])
    assert (cell.name, cell.overrides) == ("r", [])


def test_lists_among_the_values():
    axis = parse_axis("optimizer.betas=[0.9, 0.98],[0.9, 0.999]")
    assert axis.values == ("[0.9, 0.98]", "[0.9, 0.999]")
    assert cells_of(["r.yaml"], [axis])[0].name == "r/betas=[0.9,0.98]"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["train.seed"], "section.key=value,value"),
        (["=1,2"], "section.key=value,value"),
        (["train.seed="], "section.key=value,value"),
        (["train.seed=1,1"], "1 is given more than once"),
        (["optimizer.lr=1e-3,0.001"], "1e-3 and 0.001 are the same value; leave one of them out"),
        (["train.seed=1,1.0"], "1 and 1.0 are the same value"),
        (["optimizer.betas=[0.9, 1e-1],[9e-1, 0.1]"], "are the same value"),
        (["train.seed=[1"], "cannot read the values"),
        (["train.seed=1", "train.seed=2"], "names 'train.seed' twice"),
    ],
)
def test_a_grid_that_makes_no_sense(axes, words):
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        cells_of(["r.yaml"], grid(*axes))


def test_recipes_of_one_name():
    with pytest.raises(UserError, match="two recipes are named 'hstu'"):
        cells_of(["a/hstu.yaml", "b/hstu.yaml"], [])


@pytest.mark.parametrize("values", ["a/b,a_b", "'a b',ab"])
def test_values_that_would_share_a_folder(values):
    with pytest.raises(UserError, match=r"would share the folder 'r/split=.*'; give these values names .* --variant"):
        cells_of(["r.yaml"], grid(f"data.split={values}", "train.seed=0,1"))


def test_values_that_only_look_alike_are_no_repetition():
    assert parse_axis("data.split=1e-3,0.001").values == ("1e-3", "0.001")
    assert parse_axis("model.no_such_key=1,true").values == ("1", "true")


@pytest.mark.parametrize("size", [251, 252])
def test_a_folder_name_that_is_too_long(size):
    split = "a" * (size - len("split=,seed=0"))
    axes = grid("train.seed=0", f"data.split=x,{split}")
    if size == 251:  # with .log at its end it is as long as a name may be
        assert len(cells_of(["r.yaml"], axes)) == 2
        return
    with pytest.raises(
        UserError, match=r"run of r\.yaml .* name of 252 bytes, and 251 is the most; name its .*--variant"
    ):
        cells_of(["r.yaml"], axes)
    with pytest.raises(UserError, match=r"name of 260 bytes.*give the variant a shorter name"):
        cells_of(["r.yaml"], [], variants(f"{'v' * 260}:"))


@pytest.mark.parametrize("name", ["logs", "sweep.json"])
def test_a_recipe_named_like_what_a_sweep_writes(name):
    with pytest.raises(UserError, match=f"a/{name}.yaml: a sweep writes its own '{name}'.*rename it"):
        cells_of([f"a/{name}.yaml"], grid("train.seed=0,1"))


def variants(*texts):
    return [parse_variant(text) for text in texts]


def test_a_variant_brings_its_settings_together_and_meets_all_of_the_grid():
    cells = cells_of(
        ["hstu.yaml"],
        grid("model.dropout=0.1,0.2", "train.seed=0,1"),
        variants("as it is:", "mixed: loss.sampler=mixture, loss.shares=[0.5, 0.5, 0, 0],loss.expansion = 2"),
    )
    assert len(cells) == 8
    assert cells[0].name == "hstu/as-it-is,dropout=0.1,seed=0" and cells[4].name == "hstu/mixed,dropout=0.1,seed=0"
    assert cells[4].overrides == ["loss.sampler=mixture", "loss.shares=[0.5, 0.5, 0, 0]", "loss.expansion=2",
                                  "model.dropout=0.1", "train.seed=0"]  # fmt: skip
    assert cells[0].group == cells[1].group == ("hstu", "as it is, dropout=0.1")
    assert cells[0].group != cells[2].group != cells[4].group
    (alone,) = cells_of(["hstu.yaml"], [], variants("64 shared/to 128: loss.num_negatives=64"))
    assert (alone.name, alone.group) == ("hstu/64-shared-to-128", ("hstu", "64 shared/to 128"))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["wide"], "write it as name: section.key=value"),
        ([": model.dim=8"], "write it as name: section.key=value"),
        (["..: model.dim=8"], "write it as name: section.key=value"),
        (["wide: model.dim"], "write it as name: section.key=value"),
        (["wide: model.dim="], "write it as name: section.key=value"),
        (["wide: model.dim=8, model.dim=9"], "sets 'model.dim' twice"),
        (["a b: model.dim=8", "a-b: model.dim=9"], "share the folder 'a-b'"),
        (["one: train.seed=1"], "'train.seed' is set by --grid and by the variant 'one'"),
    ],
)
def test_a_variant_that_makes_no_sense(texts, words):
    with pytest.raises(UserError, match=words):
        cells_of(["r.yaml"], grid("train.seed=0"), variants(*texts))


def sweep(recipe, data, out, *more):
    return main(["sweep", str(recipe), "--data", str(data), "--out", str(out), *more])


def test_a_sweep_compares_and_runs_nothing_twice(recipe, data, tmp_path, capsys):
    out = tmp_path / "sweep"
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1", "--jobs", "2") == 0
    shown = capsys.readouterr().out
    assert "[2/2]" in shown and "NDCG@10" in shown and "±" in shown and "protocol:" in shown
    record = json.loads((out / "sweep.json").read_text())
    assert record["metric"] == "ndcg@10" and len(record["runs"]) == 2
    for run in record["runs"]:
        summary = json.loads((out / run["name"] / "summary.json").read_text())
        assert run["metrics"]["ndcg@10"] == summary["metrics"]["ndcg@10"]
        assert run["curve"]["epoch"] == [1.0, 2.0]
    first = json.loads((out / "tiny" / "seed=0" / "summary.json").read_text())
    assert {baseline["name"]: baseline["metrics"] for baseline in record["baselines"]} == first["baselines"]
    for name, metrics in first["baselines"].items():
        (line,) = [line.split() for line in shown.splitlines() if line.startswith(name)]
        assert line[1:5] == ["-", "test", "-", "-"] and line[5] == f"{metrics['hr@10']:.4f}"
    assert (out / "sweep.svg").read_text().startswith("<svg")
    times = {path: path.stat().st_mtime_ns for path in out.glob("tiny/*/summary.json")}

    assert sweep(recipe, data, out, "--grid", "train.seed=0,1,2", "--dry-run") == 0
    assert capsys.readouterr().out.count("to do") == 1
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1,2") == 0
    assert "2 of 3 runs are finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert len(json.loads((out / "sweep.json").read_text())["runs"]) == 3

    (out / "sweep.json").unlink()
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1,2,3", "--compare-only") == 0
    assert len(json.loads((out / "sweep.json").read_text())["runs"]) == 3
    assert sweep(recipe, data, tmp_path / "empty", "--compare-only") == 2

    linked = tmp_path / "linked"
    (linked / "tiny").mkdir(parents=True)
    for seed in (0, 1):
        (linked / "tiny" / f"four,seed={seed}").symlink_to(out / "tiny" / f"seed={seed}")
    (linked / "tiny" / "eight,seed=0").symlink_to(out / "tiny" / "seed=2")
    capsys.readouterr()
    named = ["--variant", "four: loss.num_negatives=4", "--variant", "eight: loss.num_negatives=8, model.dim=8"]
    assert sweep(recipe, data, linked, *named, "--grid", "train.seed=0,1", "--compare-only") == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    assert [line[:3] for line in lines if line[:1] == ["tiny"]] == [["tiny", "four", "2"]]
    assert [line.partition("note: ")[2] for line in shown.err.splitlines()] == [
        "tiny/eight,seed=0 is left out: it was started with loss.num_negatives=4, not 8; "
        "started with train.seed=2, not 0"
    ]
    assert json.loads((linked / "sweep.json").read_text())["runs"][0]["settings"] == "four"

    metrics = out / "tiny" / "seed=0" / "metrics.jsonl"
    last = [line for line in metrics.read_text().splitlines() if '"eval"' in line][-1]
    metrics.write_text(metrics.read_text() + last + "\n" + last[:40])  # evaluated again, then killed within a line
    comparison = compare(cells_of([recipe], grid("train.seed=0")), out)
    assert comparison is not None and comparison.runs[0].curve["epoch"] == [1.0, 2.0]


def test_a_signal_reaches_the_runs_and_the_next_start_resumes(recipe, data, tmp_path):
    out = tmp_path / "sweep"
    arguments = ["sweep", str(recipe), "--data", str(data), "--out", str(out), "--set", "train.epochs=100000"]
    process = subprocess.Popen([sys.executable, "-m", "turbogr", *arguments], stderr=subprocess.PIPE, text=True)
    metrics = out / "tiny" / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() and '"eval"' in metrics.read_text():
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 143 and "continue with: turbogr sweep" in printed
    assert json.loads((out / "tiny" / "run.json").read_text())["status"] == "interrupted"
    record = json.loads((out / "sweep.json").read_text())
    assert record["runs"][0]["finished"] is False
    done = int(record["runs"][0]["curve"]["epoch"][-1])
    assert sweep(recipe, data, out, "--set", f"train.epochs={done + 1}") == 0
    assert json.loads((out / "sweep.json").read_text())["runs"][0]["finished"] is True


@pytest.mark.parametrize("signals", [[signal.SIGINT] * 2, [signal.SIGHUP], [signal.SIGTERM] * 2, [signal.SIGKILL]])
def test_no_run_outlives_its_sweep(recipe, data, tmp_path, signals):
    if signal.SIGKILL in signals and not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process that its parent was killed")
    out = tmp_path / "sweep"
    arguments = ["sweep", str(recipe), "--data", str(data), "--out", str(out), "--set", "train.epochs=100000"]
    process = subprocess.Popen([sys.executable, "-m", "turbogr", *arguments], stderr=subprocess.DEVNULL)
    record = out / "tiny" / "run.json"
    try:
        wait_until(lambda: (out / "tiny" / "metrics.jsonl").exists())
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(0.03)
        process.wait(120)
    finally:
        process.kill()
    wait_until(lambda: not is_held(out / "tiny"))  # what is killed cannot wait for its runs
    assert json.loads(record.read_text())["status"] != "finished"
    if signal.SIGHUP in signals:
        assert process.returncode == 129 and json.loads(record.read_text())["status"] == "interrupted"


def wait_until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_held(run):
    """Whether a process is training in this folder."""
    handle = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def test_runs_of_other_data_or_settings_are_not_taken_for_those_of_the_sweep(recipe, data, trained, tmp_path, capsys):
    out, other = tmp_path / "sweep", tmp_path / "store"
    write_store(other, draw_histories(1, 60, 20, shortest=4), 20)
    copied(trained, "seeds/tiny/seed=0", out)
    for store, more, words in (
        (other, [], f"trained on {data}"),
        (data, ["--set", "model.dim=16"], "model.dim=8, not 16"),
    ):
        assert sweep(recipe, store, out, "--grid", "train.seed=0,1", *more) == 2
        shown = capsys.readouterr()
        assert words in shown.err and "±" not in shown.out and not (out / "tiny" / "seed=1").exists()
        assert sweep(recipe, store, out, "--grid", "train.seed=0", "--compare-only", *more) == 2
        shown = capsys.readouterr()
        assert f"tiny/seed=0 is left out: it was {'trained on' if store is other else 'started with'}" in shown.err
        assert "no run of this sweep" in shown.err and "HR@10" not in shown.out


def test_metrics_by_another_rule_are_measured_again(recipe, data, trained, tmp_path, capsys):
    out = tmp_path / "sweep"
    copied(trained, "seeds/tiny/seed=0", out)
    path = out / "tiny" / "seed=0" / "summary.json"
    today = json.loads(path.read_text())
    del today["state"]["repeated"]
    path.write_text(json.dumps({**today, "metrics": dict.fromkeys(today["metrics"], 1.0)}))
    capsys.readouterr()
    assert sweep(recipe, data, out, "--grid", "train.seed=0", "--compare-only") == 2
    assert "tiny/seed=0 is left out: it was measured when a repeated item was not yet missed" in capsys.readouterr().err
    assert sweep(recipe, data, out, "--grid", "train.seed=0") == 0
    assert json.loads(path.read_text())["metrics"] == today["metrics"]


def test_runs_of_another_recipe_of_the_same_name_are_left_out(recipe, data, trained, tmp_path, capsys):
    out = tmp_path / "sweep"
    copied(trained, "seeds/tiny/seed=0", out)
    recipe.write_text(RECIPE.replace("name: sasrec, dim: 8", "name: hstu, dim: 16"))
    capsys.readouterr()
    assert sweep(recipe, data, out, "--grid", "train.seed=0", "--compare-only") == 2
    shown = capsys.readouterr()
    assert (
        "tiny/seed=0 is left out: it was started with model.name=sasrec, not hstu; started with model.dim=8"
        in shown.err
    )
    assert "HR@10" not in shown.out
    recipe.write_text(RECIPE.replace("epochs: 2", "epochs: 3").replace("every: 1", "every: 2"))
    assert sweep(recipe, data, out, "--grid", "train.seed=0", "--compare-only") == 0
    shown = capsys.readouterr()
    assert not shown.err and "HR@10" in shown.out
    assert sweep(recipe, data, out, "--grid", "train.seed=0", "--set", "train.epochs=3", "--compare-only") == 2
    assert "it was started with train.epochs=2, not 3\n" in capsys.readouterr().err
    recipe.unlink()
    assert sweep(recipe, data, out, "--grid", "train.seed=0", "--compare-only") == 2
    assert f"cannot read the recipe {recipe}" in capsys.readouterr().err


def test_a_variant_of_other_settings_is_not_gone_on_with(recipe, data, tmp_path, capsys):
    out = tmp_path / "sweep"
    named = ["--variant", "slow: optimizer.lr=1e-4, optimizer.warmup_steps=null, train.epochs={}"]
    assert sweep(recipe, data, out, named[0], named[1].format(1)) == 0
    config = (out / "tiny" / "slow" / "config.yaml").read_bytes()
    capsys.readouterr()
    assert sweep(recipe, data, out, named[0], named[1].format(1).replace("1e-4", "1e-5")) == 2
    printed = capsys.readouterr().err
    assert f"{out / 'tiny' / 'slow'} was started with optimizer.lr=0.0001, not 1e-05; give the same value" in printed
    assert (out / "tiny" / "slow" / "config.yaml").read_bytes() == config
    assert sweep(recipe, data, out, named[0], named[1].format(30), "--dry-run") == 0  # and a longer warm-up
    assert "tiny/slow  to do" in capsys.readouterr().out


def test_no_run_is_made_shorter_than_it_was_trained(recipe, data, tmp_path, capsys):
    out = tmp_path / "sweep"
    seeds = ["--grid", "train.seed=0,1", "--set"]
    assert sweep(recipe, data, out, "--grid", "train.seed=1", "--set", "train.epochs=4") == 0
    config = (out / "tiny" / "seed=1" / "config.yaml").read_bytes()
    steps = json.loads((out / "tiny" / "seed=1" / "summary.json").read_text())["steps"]
    for setting, reason, least in (
        ("train.epochs=2", "trained for 4 epochs already, and train.epochs is 2", 4),
        (f"train.steps={steps - 1}", f"trained for {steps} steps already, and train.steps is {steps - 1}", steps),
    ):
        capsys.readouterr()
        assert sweep(recipe, data, out, *seeds, "train.epochs=4", "--set", setting) == 2
        printed = capsys.readouterr().err
        assert (
            f"{out / 'tiny' / 'seed=1'} was {reason}; set it to {least} or more, or start a new run in another"
            in printed
        )
        assert not (out / "tiny" / "seed=0").exists()
        assert (out / "tiny" / "seed=1" / "config.yaml").read_bytes() == config
        more = ["--set", setting] if "epochs" in setting else ["--set", "train.epochs=4", "--set", setting]
        assert sweep(recipe, data, out, "--grid", "train.seed=1", *more, "--compare-only") == 2
        assert f"tiny/seed=1 is left out: it was {reason}\n" in capsys.readouterr().err
    assert sweep(recipe, data, out, "--grid", "train.seed=1", "--set", "train.epochs=4", "--dry-run") == 0
    assert "tiny/seed=1  finished" in capsys.readouterr().out
    assert sweep(recipe, data, out, "--grid", "train.seed=1", "--set", "train.epochs=5", "--dry-run") == 0
    assert "tiny/seed=1  to do" in capsys.readouterr().out


def test_sweeps_with_and_without_a_grid_do_not_share_a_folder(recipe, data, tmp_path, capsys):
    first, second = tmp_path / "grid", tmp_path / "alone"
    short = ["--set", "train.epochs=1"]
    assert sweep(recipe, data, first, "--grid", "train.seed=0", *short) == 0
    assert sweep(recipe, data, second, *short) == 0
    for dry in (["--dry-run"], []):
        capsys.readouterr()
        assert sweep(recipe, data, first, *short, *dry) == 2
        printed = capsys.readouterr().err
        assert f"{first / 'tiny'} has runs of a sweep with --grid or --variant in it, such as seed=0," in printed
        assert "; choose another --out, or give that --grid or --variant again" in printed
        assert sweep(recipe, data, second, "--grid", "train.seed=0", *short, *dry) == 2
        printed = capsys.readouterr().err
        assert f"{second / 'tiny'} is a run itself, and {second / 'tiny' / 'seed=0'} would be inside it" in printed
        assert "; choose another --out, or move the run" in printed
    assert not (first / "logs" / "tiny.log").exists() and not (second / "tiny" / "seed=0").exists()
    assert sweep(recipe, data, second / "tiny", "--dry-run") == 2
    assert f"{second / 'tiny'} is a run itself" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_trainer")
@pytest.mark.parametrize("place", ["", "tiny", "tiny/seed=1", "tiny/seed=1/mine.txt"])
def test_what_is_not_a_run_is_refused_before_anything_runs(recipe, data, tmp_path, capsys, place):
    out = tmp_path / "sweep"
    (out / place).parent.mkdir(parents=True, exist_ok=True)
    (out / place).write_text("mine")
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1") == 2
    printed = capsys.readouterr().err
    folder = out / place if not place.endswith(".txt") else (out / place).parent
    assert f"{folder} is " in printed and "choose another --out" in printed
    assert not list(tmp_path.rglob("*.calls"))


def test_every_recipe_chooses_by_its_own_metric(recipe, data, tmp_path, capsys):
    by_rank = tmp_path / "rank.yaml"
    by_rank.write_text(RECIPE.replace("ndcg@10", "mrr").replace("epochs: 2", "epochs: 8"))
    out = tmp_path / "sweep"
    assert main(["sweep", str(recipe), str(by_rank), "--data", str(data), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "validation, NDCG@10" in shown and "validation, MRR" in shown
    runs = {run["name"]: run for run in json.loads((out / "sweep.json").read_text())["runs"]}
    for name, metric in (("tiny", "ndcg@10"), ("rank", "mrr")):
        curve = runs[name]["curve"]
        best = curve["epoch"][curve[metric].index(max(curve[metric]))]
        step = json.loads((out / name / "summary.json").read_text())["step"]
        assert (runs[name]["chosen_by"], runs[name]["best_epoch"]) == (metric, best)
        assert step == best * runs_per_epoch(out / name)


def runs_per_epoch(run):
    record = json.loads((run / "summary.json").read_text())
    return record["steps"] / record["epochs"]


def test_a_damaged_summary_is_made_again(recipe, data, trained, tmp_path, capsys):
    out = tmp_path / "sweep"
    copied(trained, "seeds/tiny", out)
    summary = out / "tiny" / "seed=0" / "summary.json"
    whole = json.loads(summary.read_text())
    for damaged in (summary.read_text()[:100], "{}", "[]"):
        summary.write_text(damaged)
        capsys.readouterr()
        assert sweep(recipe, data, out, "--grid", "train.seed=0,1", "--compare-only") == 0
        assert "1 (1 not finished)" in capsys.readouterr().out
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1") == 0
    assert json.loads(summary.read_text())["metrics"] == whole["metrics"]


TRAINER = """
import json, pathlib, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
run = pathlib.Path(options["--out"])
if run.with_name(f"{run.name}.broken").exists():
    sys.exit(f"turbogr: {run} is broken")
run.mkdir(parents=True, exist_ok=True)
with run.with_name(f"{run.name}.calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def quick_trainer(tmp_path, monkeypatch):
    """A program in the place of `turbogr train` that only notes its arguments."""
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER)
    monkeypatch.setattr(runner, "TRAIN", [sys.executable, str(program)])


@pytest.mark.usefixtures("quick_trainer")
def test_a_run_that_fails_leaves_the_others_alone_and_is_tried_again(recipe, data, tmp_path, capsys):
    out = tmp_path / "sweep"
    broken = out / "tiny" / "seed=0.broken"
    broken.parent.mkdir(parents=True)
    broken.touch()
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1") == 1
    assert f"tiny/seed=0 failed: turbogr: {out / 'tiny' / 'seed=0'} is broken" in capsys.readouterr().err
    assert (out / "tiny" / "seed=1.calls").exists()
    broken.unlink()
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1") == 0


ENDINGS = [
    ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL; the system does that when memory runs out"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
    ("os._exit(3)", "ended with status 3 and no message"),
]


@pytest.mark.parametrize(("ending", "reason"), ENDINGS)
def test_the_reason_is_that_of_this_attempt(recipe, data, tmp_path, monkeypatch, capsys, ending, reason):
    out, program = tmp_path / "sweep", tmp_path / "trainer.py"
    monkeypatch.setattr(runner, "TRAIN", [sys.executable, str(program)])
    program.write_text("import sys\nprint('epoch 3  valid hr@10 0.1  best so far')\nsys.exit('no space left')")
    assert sweep(recipe, data, out) == 1
    assert "tiny failed: no space left" in capsys.readouterr().err
    program.write_text(f"import os, signal\n{ending}")
    assert sweep(recipe, data, out) == 1
    assert f"tiny failed: {reason}" in capsys.readouterr().err
    program.write_text(f"import os, signal\nprint('epoch 4  best so far', flush=True)\n{ENDINGS[0][0]}")
    assert sweep(recipe, data, out) == 1
    assert "tiny failed: killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_trainer")
def test_every_run_gets_its_settings(recipe, data, tmp_path):
    out = tmp_path / "sweep"
    assert sweep(recipe, data, out, "--grid", "train.seed=5", "--set", "train.epochs=7") == 0
    (call,) = (out / "tiny" / "seed=5.calls").read_text().splitlines()
    assert "--resume" in call and call.endswith("--set train.epochs=7 --set train.seed=5")
    assert sweep(recipe, data, out, "--variant", "few: loss.num_negatives=2", "--set", "train.epochs=7") == 0
    (call,) = (out / "tiny" / "few.calls").read_text().splitlines()
    assert call.endswith("--set train.epochs=7 --set loss.num_negatives=2")


@pytest.mark.usefixtures("quick_trainer")
def test_every_run_has_a_log_of_its_own(recipe, data, tmp_path):
    wide = tmp_path / "tiny-wide.yaml"
    wide.write_text(RECIPE)
    out = tmp_path / "sweep"
    assert sweep(recipe, data, out, "--variant", "wide-a: model.dim=16") == 0
    assert sweep(wide, data, out, "--variant", "a: model.dim=16") == 0  # tiny/wide-a and tiny-wide/a
    assert len(list((out / "logs").rglob("*.log"))) == 2


def test_a_wrong_setting_is_refused_before_anything_runs(recipe, data, tmp_path, capsys):
    assert sweep(recipe, data, tmp_path / "sweep", "--grid", "model.dropout=0.1,2.0") == 2
    assert "dropout" in capsys.readouterr().err
    long = f"data.split=leave-two-out,{'x' * 300}"
    for dry in ([], ["--dry-run"]):
        assert sweep(recipe, data, tmp_path / "sweep", "--jobs", "0", *dry) == 2
        assert "--jobs is 0" in capsys.readouterr().err
        assert sweep(recipe, data, tmp_path / "sweep", "--grid", "train.device=cpu,nope", *dry) == 2
        assert "train.device 'nope' cannot be used here" in capsys.readouterr().err
        assert sweep(recipe, data, tmp_path / "sweep", "--grid", long, *dry) == 2
        assert "name of 306 bytes" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def run_of(name, group, values, finished=True):
    curve = {"epoch": [1.0, 2.0, 3.0][: len(values)], "hr@10": values}
    return RunResult(name, group, finished, HR, [HR], {"hr@10": max(values)}, None, curve)


def test_the_table_has_mean_and_spread_and_says_what_is_open():
    runs = [
        run_of("a/seed=0", ("a", ""), [0.1, 0.3, 0.2]),
        run_of("a/seed=1", ("a", ""), [0.1, 0.5], finished=False),
        run_of("b/seed=0", ("b", ""), [0.4]),
    ]
    table = Comparison(HR, runs).table()
    assert table.columns == ["recipe", "runs", "measured on", "epoch chosen on", "best epoch", "HR@10"]
    assert table.rows == [
        ["a", "2 (1 not finished)", "test", "test", "2 ± 0", "0.4000 ± 0.1414"],
        ["b", "1", "test", "test", "1", "0.4000"],
    ]


def test_runs_without_a_common_epoch_are_drawn_as_lines_of_their_own():
    runs = [
        dataclasses.replace(run_of(f"a/seed={n}", ("a", ""), [0.1, 0.3]), curve={"epoch": at, "hr@10": [0.1, 0.3]})
        for n, at in enumerate(([0.5, 0.58], [0.55, 0.64]))
    ]
    comparison = Comparison(HR, runs)
    assert comparison.table().rows[0][4] == "0.61 ± 0.04"
    drawn = comparison.plot()
    assert "a/seed=0" in drawn and "a/seed=1" in drawn
    curve = {"epoch": [1.0], "mrr": [0.2]}
    other = dataclasses.replace(runs[0], name="b", group=("b", ""), metric=describe_metric("mrr"), curve=curve)
    assert "a/seed=0" in Comparison(HR, [*runs, other]).plot()


def test_baselines_stand_once_or_with_the_settings_that_change_them():
    def run(settings, popularity, part="test"):
        found = run_of("a", ("a", settings), [0.5])
        return dataclasses.replace(found, part=part, baselines={"popularity": {"hr@10": popularity}, "markov": {}})

    table = Comparison(HR, [run("", 0.1), run("", 0.1)]).table()
    assert table.rows[1:] == [["popularity", "-", "test", "-", "-", "0.1000"], ["markov", "-", "test", "-", "-", "-"]]
    table = Comparison(HR, [run("split=x", 0.1), run("split=y", 0.2), run("split=y", 0.2)]).table()
    assert [row[:2] + row[-1:] for row in table.rows[2:]] == [
        ["popularity", "split=x", "0.1000"], ["popularity", "split=y", "0.2000"], ["markov", "-", "-"]
    ]  # fmt: skip
    parts = Comparison(HR, [run("", 0.1), run("", 0.1, "valid")]).baselines()
    assert [baseline.part for baseline in parts if baseline.name == "popularity"] == ["test", "valid"]


def test_baselines_measured_at_other_cut_offs_are_the_same():
    def run(settings, baseline):
        found = run_of("a", ("a", settings), [0.5])
        metrics = dict.fromkeys(baseline, 0.5)
        described = describe_metrics(metrics)
        return dataclasses.replace(found, metrics=metrics, described=described, baselines={"popularity": baseline})

    runs = [run("ks=[10]", {"hr@10": 0.1}), run("ks=[5,10]", {"hr@5": 0.05, "hr@10": 0.1})]
    table = Comparison(HR, runs).table()
    assert table.columns[-1] == "HR@10"
    assert table.rows[2:] == [["popularity", "-", "-", "test", "-", "-", "0.1000"]]
    (baseline,) = Comparison(HR, runs).record()["baselines"]
    assert baseline["metrics"] == {"hr@5": 0.05, "hr@10": 0.1} and baseline["settings"] == ""
    runs.append(run("split=y", {"hr@10": 0.2}))
    assert [row[-1] for row in Comparison(HR, runs).table().rows[3:]] == ["0.1000", "0.2000"]


def test_a_metric_that_should_be_low_chooses_its_lowest_value(recipe, trained, tmp_path):
    copied(trained, "alone/tiny", tmp_path / "sweep")
    run = tmp_path / "sweep" / "tiny"
    (run / "summary.json").unlink()  # as of a run that is not finished
    loss = MetricInfo("ndcg@10", "Log loss", higher_is_better=False)  # by a name that this release's config knows
    record = {**json.loads((run / "run.json").read_text()), "metrics": [dataclasses.asdict(loss)]}
    (run / "run.json").write_text(json.dumps(record))
    losses = [0.6, 0.4, 0.5]
    records = [
        {"kind": "eval", "step": 4 * epoch, "part": "valid", "epoch": epoch, "ndcg@10": value, "num_users": 60}
        for epoch, value in enumerate(losses, start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    comparison = compare(cells_of([recipe], []), tmp_path / "sweep")
    assert comparison is not None
    assert comparison.runs[0].metrics == {"ndcg@10": 0.4}
    (row,) = [dict(zip(comparison.table().columns, row, strict=True)) for row in comparison.table().rows]
    assert (row["best epoch"], row["Log loss"]) == ("2", "0.4000")
    assert comparison.record()["runs"][0]["best_epoch"] == 2
    assert "Log loss by epoch on the validation items" in comparison.plot()


def test_a_run_evaluated_by_other_metrics_before_is_compared_by_the_common_ones(recipe, trained, tmp_path):
    copied(trained, "alone/tiny", tmp_path / "sweep")
    run = tmp_path / "sweep" / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "eval")
    del first["hr@50"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = compare(cells_of([recipe], []), tmp_path / "sweep")
    assert comparison is not None
    assert "hr@10" in comparison.runs[0].curve and "hr@50" not in comparison.runs[0].curve


def test_no_mean_mixes_the_test_item_with_the_validation_item(recipe, data, trained, tmp_path, capsys):
    out = tmp_path / "sweep"
    copied(trained, "seeds/tiny", out)
    assert sweep(recipe, data, out, "--grid", "train.seed=0,1,2") == 0
    protocol = [line for line in capsys.readouterr().out.splitlines() if line.startswith("protocol:")]
    assert len(protocol) == 1 and "the test item is ranked against all 20 items" in protocol[0]
    assert protocol[0].endswith("; the epoch is chosen on the validation item")
    summary = out / "tiny" / "seed=2" / "summary.json"
    summary.unlink()  # as of a run that is not finished
    comparison = compare(cells_of([recipe], grid("train.seed=0,1,2")), out)
    assert comparison is not None
    rows = [dict(zip(comparison.table().columns, row, strict=True)) for row in comparison.table().rows]
    rows = [row for row in rows if row["recipe"] == "tiny"]
    assert [(row["runs"], row["measured on"], row["epoch chosen on"]) for row in rows] == [
        ("2", "test", "validation"),
        ("1 (1 not finished)", "validation", "validation"),
    ]
    tested = [json.loads((out / "tiny" / f"seed={n}" / "summary.json").read_text())["metrics"]["mrr"] for n in (0, 1)]
    assert rows[0]["MRR"].startswith(f"{sum(tested) / 2:.4f}")
    assert rows[1]["MRR"] == f"{comparison.runs[2].metrics['mrr']:.4f}"
    assert [run["part"] for run in comparison.record()["runs"]] == ["test", "test", "valid"]
    assert "on the validation items" in comparison.plot()


def test_a_published_recipe_can_choose_its_epoch_on_a_validation_item(tmp_path, capsys):
    published = Path(__file__).parents[2] / "recipes" / "ml-1m" / "hstu.yaml"
    data, out = tmp_path / "store", tmp_path / "sweep"
    write_store(data, draw_histories(0, 60, 20, shortest=4), 20, split="leave-one-out")
    settings = ["data.split=leave-two-out", "evaluate.every=2", "train.epochs=5", "train.tensorboard=false"]
    assert sweep(published, data, out, *(part for setting in settings for part in ("--set", setting))) == 0
    shown = capsys.readouterr().out
    assert "the test item is ranked" in shown and "the epoch is chosen on the validation item" in shown

    summary = json.loads((out / "hstu" / "summary.json").read_text())
    records = [json.loads(line) for line in (out / "hstu" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert {record["part"] for record in evaluations} == {"valid"} and summary["part"] == "test"
    assert summary["step"] == max(evaluations, key=lambda record: record["hr@10"])["step"]
    protocol = summary["protocol"]["text"]
    assert "leave-two-out" in protocol and "the test item is ranked against all" in protocol
    before = (out / "sweep.json").read_text()
    (out / "hstu" / "summary.json").write_text(json.dumps({**summary, "protocol": protocol}))  # as 0.1.0 wrote it
    assert sweep(published, data, out, *(part for setting in settings for part in ("--set", setting))) == 0
    assert (out / "sweep.json").read_text() == before
    assert main(["evaluate", str(out / "hstu"), "--part", "test"]) == 0
    tested = json.loads((out / "hstu" / "evaluation.json").read_text())
    assert next(iter(tested["parts"]["test"].values())) == summary["metrics"] and tested["step"] == summary["step"]
    (run,) = json.loads((out / "sweep.json").read_text())["runs"]
    assert run["metrics"] == summary["metrics"] and (run["part"], run["chosen_on"]) == ("test", "valid")


def test_evaluations_on_another_part_before_a_resumption_do_not_count(recipe, trained, tmp_path):
    copied(trained, "alone/tiny", tmp_path / "sweep")
    run = tmp_path / "sweep" / "tiny"
    (run / "summary.json").unlink()
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if '"eval"' in line)
    lines[first] = json.dumps({**json.loads(lines[first]), "part": "test", "ndcg@10": 1.0})
    metrics.write_text("\n".join(lines) + "\n")
    comparison = compare(cells_of([recipe], []), tmp_path / "sweep")
    assert comparison is not None and comparison.runs[0].curve["epoch"] == [2.0]
    assert comparison.runs[0].metrics["ndcg@10"] < 1.0


def test_nothing_to_compare(tmp_path):
    assert compare(cells_of(["r.yaml"], []), tmp_path) is None


def test_a_run_that_delivers_something_else_than_its_model_is_noted(recipe, data, tmp_path, capsys):
    out = tmp_path / "sweep"
    settings = ["--set", "train.seed=0", "--set", "deliver.choose=best", "--set", "optimizer.lr=1e-6"]
    assert main(["sweep", str(recipe), "--data", str(data), "--out", str(out), *settings]) == 0
    printed = capsys.readouterr().out
    (run,) = json.loads((out / "sweep.json").read_text())["runs"]
    summary = json.loads((out / run["name"] / "summary.json").read_text())
    assert summary["metrics"] != summary["model_metrics"], "an untrained model is not delivered alone"
    assert run["metrics"].items() <= summary["metrics"].items() and run["delivered"] == summary["delivered"]
    assert f"note: {run['name']} delivers {summary['delivered']}, and its metrics are of that" in printed
