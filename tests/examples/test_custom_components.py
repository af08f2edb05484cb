"""`examples/custom_block.py`, `custom_mask.py` and `custom_loss.py` run as they are, and on several ranks and in all
pipeline modes as the built-in components do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.own_registry import forget_plugins, own_registry
from tests.parallel.ranks import run_ranks
from tests.training.conftest import write_store
from turbogr import cli, plugins
from turbogr.errors import Note, UserError
from turbogr.runs import load_model
from turbogr.training.run import train

__all__ = ["own_registry"]

FOLDER = Path(__file__).parents[2] / "examples"
MODES = ("sync", "semi_async", "exact_overlap")
CHOICES = {
    "block": ["model.name=conv", "conv.kernel_size=3"],
    "mask": ["model.mask=session", "session.minutes=45"],
    "loss": ["loss.name=bpr", "bpr.margin=0.2", "loss.sampler=in-batch"],
}
RECIPE = """
model: {dim: 16, num_blocks: 2, num_heads: 1, max_len: 16}
loss: {num_negatives: 8}
data: {batch_size: 16}
train: {epochs: 2, tensorboard: false, profile: false}
"""

pytestmark = pytest.mark.usefixtures("own_registry")


def example(kind: str) -> Path:
    return FOLDER / f"custom_{kind}.py"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("examples") / "store").path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def arguments(kind: str, recipe: Path, store: Path, out: Path, *more: str) -> list[str]:
    """The command line that trains with an example."""
    settings = [part for setting in (*CHOICES[kind], *more) for part in ("--set", setting)]
    options = ["--data", str(store), "--out", str(out), "--plugins", str(example(kind))]
    return ["train", str(recipe), *options, *settings]


def weights(run: Path, kind: str) -> dict[str, torch.Tensor]:
    plugins.load_plugins([example(kind)])
    trained = load_model(run, "last")
    return {**dict(trained.task.model.named_parameters()), **{f"table {n}": t for n, t in trained.tables.items()}}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", CHOICES)
def test_an_example_runs(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(example(kind))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    measured = [line.split() for line in done.stdout.splitlines()]
    assert [words[1] for words in measured] == ["hr@10", "hr@10"], "the built-in's and the example's"
    assert all(0.15 < float(words[2]) < 1 for words in measured), done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", CHOICES)
def test_an_example_is_30_to_60_lines(kind: str) -> None:
    assert 30 <= len(example(kind).read_text().splitlines()) <= 60


@pytest.mark.parametrize("kind", CHOICES)
def test_two_ranks_train_as_one_in_every_pipeline_mode(kind: str, recipe: Path, store: Path, tmp_path: Path) -> None:
    ends = {}
    for mode in MODES:
        one, two = tmp_path / f"{mode}-1", tmp_path / f"{mode}-2"
        assert cli.main(arguments(kind, recipe, store, one, f"pipeline.mode={mode}")) == 0
        assert run_ranks(2, cli.main, arguments(kind, recipe, store, two, f"pipeline.mode={mode}")) == [0, 0]
        ends[mode] = weights(one, kind)
        assert_close(weights(two, kind), ends[mode], 2e-4)
    assert_close(ends["exact_overlap"], ends["sync"], 0.0)
    changed = [name for name, tensor in ends["semi_async"].items() if not torch.equal(tensor, ends["sync"][name])]
    assert changed, "batches in flight do not see the last updates"


def test_the_command_line_hands_the_file_to_its_ranks(recipe: Path, store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*arguments("block", recipe, store, run, "train.steps=2"), "--ranks", "2"]
    subprocess.run([sys.executable, "-m", "turbogr", *command], check=True, timeout=200)
    evaluate = ["evaluate", str(run), "--plugins", str(example("block")), "--ranks", "2"]
    subprocess.run([sys.executable, "-m", "turbogr", *evaluate], check=True, timeout=200)
    assert (run / "evaluation.json").exists()


@pytest.fixture
def run(recipe: Path, store: Path, tmp_path: Path) -> Path:
    """A run with a plug-in that is in a file of its own, in a process that has not loaded it."""
    block = tmp_path / "my_block.py"
    block.write_text(example("block").read_text())
    config = tmp_path / "mine.yaml"
    config.write_text(
        RECIPE.replace("model: {", "plugins: [my_block.py]\nconv: {kernel_size: 3}\nmodel: {name: conv, ")
    )
    train(config, store, tmp_path / "run", overrides=["train.steps=3"])
    forget_plugins()
    return tmp_path / "run"


def test_a_run_records_its_components(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    path = tmp_path / "my_block.py"
    expected = {"kind": "block", "name": "conv", "origin": str(path), "sha256": plugins.sha256(path)}
    assert record["components"] == [expected]
    assert record["model"]["title"] == "Conv"
    assert f"plugins:\n- {path}" in (run / "config.yaml").read_text()
    assert "conv:\n  kernel_size: 3" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("command", ["evaluate", "recommend"])
def test_a_run_whose_plug_in_is_missing_says_what_to_type(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [command, str(run), *(["--out", str(tmp_path / "lists.csv")] if command == "recommend" else [])]
    capsys.readouterr()
    assert cli.main(line) == 2
    said = capsys.readouterr().err
    path = tmp_path / "my_block.py"
    for words in (f"{run} needs the block 'conv' of the plug-in {path}", "never imported", f"--plugins {path}"):
        assert words in said
    assert cli.main([*line, "--plugins", str(path)]) == 0


def test_a_report_needs_no_plug_in(run: Path) -> None:
    assert cli.main(["report", str(run)]) == 0
    assert "Conv" in (run / "report.html").read_text()


def test_a_run_starts_again_from_its_own_config(run: Path, store: Path, tmp_path: Path) -> None:
    train(run / "config.yaml", store, tmp_path / "again", overrides=["train.steps=3"])
    assert_close(weights(tmp_path / "again", "block"), weights(run, "block"), 0.0)


def test_a_resumed_run_notes_a_changed_plug_in(run: Path, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "my_block.py"
    old = plugins.sha256(path)
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.warns(Note, match=rf"the block 'conv' has changed since .*run was trained.*{str(old)[:12]}"):
        train(tmp_path / "mine.yaml", store, run, overrides=["train.steps=4"], resume=True)
    recorded = json.loads((run / "run.json").read_text())["components"]
    assert [component["sha256"] for component in recorded] == [plugins.sha256(path)]


def test_another_size_is_another_model(run: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"started with conv.kernel_size=3, not 5"):
        train(tmp_path / "mine.yaml", store, run, overrides=["train.steps=4", "conv.kernel_size=5"], resume=True)


def test_a_setting_that_the_loss_does_not_use_is_refused(recipe: Path, store: Path, tmp_path: Path) -> None:
    settings = [*CHOICES["loss"], "loss.precision=fp16"]
    with pytest.raises(UserError, match=r"loss.precision has no effect on the loss 'bpr'; leave it out"):
        train(recipe, store, tmp_path / "run", overrides=settings, plugins=[example("loss")])
