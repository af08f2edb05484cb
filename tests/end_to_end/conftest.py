from __future__ import annotations

from pathlib import Path

import pytest

from turbogr import cli, machine

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

# Small and quick, but with more than one batch, epoch and checkpoint.
TINY = [
    *("model.dim=16", "model.max_len=16", "loss.num_negatives=8", "optimizer.warmup_steps=2", "data.batch_size=16"),
    *("evaluate.every=1", "evaluate.patience=", "train.epochs=2", "train.tensorboard=false", "train.log_every=2"),
]


def train_arguments(data, out, *more):
    """The command line of a tiny run."""
    settings = [part for value in TINY for part in ("--set", value)]
    return ["train", str(RECIPE), "--data", str(data), "--out", str(out), *settings, *map(str, more)]


@pytest.fixture(scope="session", autouse=True)
def _no_peak_measurement():
    """The peak decides no result here, and measuring it takes longer than the training."""
    patch = pytest.MonkeyPatch()
    patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A small synthetic store."""
    out = tmp_path_factory.mktemp("store") / "data"
    sizes = ["--num-users", 120, "--num-items", 60, "--mean-length", 12, "--median-length", 10, "--max-length", 40]
    assert cli.main(["prepare", "synthetic", "--out", str(out), *map(str, sizes)]) == 0
    return out


@pytest.fixture(scope="session")
def run(store, tmp_path_factory):
    """A finished run on that store."""
    out = tmp_path_factory.mktemp("run") / "run"
    assert cli.main(train_arguments(store, out)) == 0
    return out


@pytest.fixture
def turbogr(capfd):
    """Call the command line in this process: returns (status, stdout, stderr)."""

    def call(*arguments):
        capfd.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        return (status, *capfd.readouterr())

    return call
