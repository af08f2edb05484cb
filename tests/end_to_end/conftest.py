from __future__ import annotations

import pytest

from tests.end_to_end.tiny import train_arguments
from turbogr import cli, machine


@pytest.fixture(scope="package", autouse=True)
def _no_peak_measurement():
    """The peak decides no result here, and measuring it takes longer than the training."""
    patch = pytest.MonkeyPatch()
    patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
    yield
    patch.undo()


@pytest.fixture(scope="package")
def store(tmp_path_factory):
    """A small synthetic store."""
    out = tmp_path_factory.mktemp("store") / "data"
    sizes = ["--num-users", 120, "--num-items", 60, "--mean-length", 12, "--median-length", 10, "--max-length", 40]
    assert cli.main(["prepare", "synthetic", "--out", str(out), *map(str, sizes)]) == 0
    return out


@pytest.fixture(scope="package")
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
