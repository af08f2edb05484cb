"""Opening a run is safe whatever its folder holds: it runs no code, and a damaged checkpoint is found and named."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tests.training.conftest import make_config, write_store
from turbogr import cli, machine
from turbogr.checkpoints import Checkpoints
from turbogr.checksums import Damaged
from turbogr.config import Config, load_config
from turbogr.data.store import Store
from turbogr.errors import Note, UserError
from turbogr.parallel.tensor_files import load_tensors, save_tensors, stored_names
from turbogr.runs import load_model, open_run
from turbogr.training.run import train


def constant_lr() -> Config:
    """A config whose steps do not depend on how many there will be."""
    config = make_config()
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule="constant"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its store."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "gemm_peak", lambda *args, **kwargs: 1e11)
        train(constant_lr(), write_store(folder / "store").path, folder / "run")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, with checkpoints of two steps; the best one is the older."""
    shutil.copytree(trained / "run", tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    progress = checkpoints.progress(12)
    progress.best_step = 8
    (tmp_path / "run/checkpoints/step-12/progress.json").write_text(progress.to_json())
    checkpoints.note_best(progress)
    shutil.rmtree(tmp_path / "run/checkpoints/step-4", ignore_errors=True)
    assert checkpoints.steps() == [8, 12]
    return tmp_path / "run"


def resume(run: Path, trained: Path, epochs: int = 4) -> Any:
    return train(constant_lr(), trained / "store", run, resume=True, overrides=[f"train.epochs={epochs}"])


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(run: Path) -> None:
    for path in sorted((run / "checkpoints/step-12").iterdir()):
        before = path.read_bytes()
        for bit in {0, 8 * len(before) // 2 + 3, 8 * len(before) - 1}:
            flip(path, bit)
            with pytest.raises(UserError, match=path.name.split(".")[0]):
                load_model(run, "last")
            path.write_bytes(before)
        path.unlink()
        with pytest.raises(UserError, match=path.name.split(".")[0]):
            load_model(run, "last")
        path.write_bytes(before)
    load_model(run, "last")
    assert {path.name for path in (run / "checkpoints/step-12").iterdir()} == {
        "part-0.json",
        "part-0.safetensors",
        "progress.json",
    }


def test_evaluate_and_recommend_refuse_a_damaged_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flip(run / "checkpoints/step-8/part-0.safetensors", 40_000)
    for command in (["evaluate", str(run)], ["recommend", str(run), "--out", str(tmp_path / "lists.csv")]):
        assert cli.main(command) == 2
        message = capsys.readouterr().err
        assert "step-8 is damaged" in message and "part-0.safetensors" in message and "--resume" in message
    assert not (tmp_path / "lists.csv").exists()
    with pytest.raises(Damaged):
        open_run(run)


def test_resume_uses_the_checkpoint_before_a_damaged_one(run: Path, trained: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    shutil.copytree(run, straight)
    resume(straight, trained)
    flip(run / "checkpoints/step-12/part-0.safetensors", 40_000)
    with pytest.warns(Note, match=r"step-12 is damaged.*now .*damaged-step-12, and the run continues from step 8"):
        assert resume(run, trained).step == 16
    assert (run / "checkpoints/damaged-step-12").is_dir()
    ours, expected = (load_model(folder, "last") for folder in (run, straight))
    assert torch.equal(ours.tables["item"], expected.tables["item"])


def test_resume_forgets_a_damaged_best_checkpoint(run: Path, trained: Path) -> None:
    flip(run / "checkpoints/step-8/progress.json", 900)
    with pytest.warns(Note, match=r"step-8 is damaged.*the best checkpoint is chosen among later ones"):
        resume(run, trained)
    assert Checkpoints(run).best() in (12, 16)


def test_resume_refuses_where_all_are_damaged(run: Path, trained: Path) -> None:
    for step in (8, 12):
        flip(run / f"checkpoints/step-{step}/part-0.json", 77)
    with pytest.raises(UserError, match=r"no checkpoint .* can be used.*step-12.*step-8"):
        resume(run, trained)
    assert Checkpoints(run).steps() == [8, 12], "nothing was moved"


# What a run folder from somebody else may hold.


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def as_dcp(folder: Path, state: dict[str, Any]) -> None:
    """Replace the tensors of a checkpoint by the files that earlier releases wrote."""
    for path in folder.glob("part-*"):
        path.unlink()
    save(state, storage_writer=FileSystemWriter(folder, overwrite=False), no_dist=True)


@pytest.mark.parametrize("poisoned", [".metadata", "__0_0.distcp"])
def test_no_command_runs_code_from_a_run_folder(
    poisoned: str, run: Path, trained: Path, tmp_path: Path, store: Store, config: Config
) -> None:
    model = load_model(run)
    weights = {name: {"weight": table} for name, table in model.tables.items()}
    mark = tmp_path / "payload-ran"
    for step in (8, 12):
        folder = run / f"checkpoints/step-{step}"
        as_dcp(folder, {"model": dict(model.task.model.named_parameters()), "tables": weights})
    load_model(run)
    for folder in (run / "checkpoints").glob("step-*"):
        size = (folder / poisoned).stat().st_size
        (folder / poisoned).write_bytes(pickle.dumps(Payload(mark)).ljust(size, b"\0"))
    run_text = str(run)
    again = ["train", str(run / "config.yaml"), "--data"]
    for command in (
        ["evaluate", run_text],
        ["evaluate", run_text, "--which", "last"],
        ["recommend", run_text, "--out", str(tmp_path / "lists.csv")],
        ["report", run_text],
        [*again, str(trained / "store"), "--out", run_text, "--resume"],
        [*again, str(store.path), "--out", str(tmp_path / "other"), "--init-from", run_text],
    ):
        cli.main(command)
        assert not mark.exists(), command
    with pytest.raises(UserError, match=r"damaged|cannot read the checkpoint"):
        load_model(run)
    with pytest.raises(UserError):
        open_run(run)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the payload works"


def test_training_from_the_config_of_a_run_imports_no_file_of_its_folder(
    run: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "plugin-ran"
    (run / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    recipe = (run / "config.yaml").read_text()
    for name in ("evil.py", str(run / "evil.py"), "../run/evil.py"):
        (run / "config.yaml").write_text(recipe.replace("plugins: []", f"plugins: ['{name}']"))
        for extra in (["--out", str(run), "--resume"], ["--out", str(tmp_path / "other")]):
            assert cli.main(["train", str(run / "config.yaml"), "--data", str(trained / "store"), *extra]) == 2
            assert "which is not imported" in capsys.readouterr().err
        load_model(run)
        assert not mark.exists()
    load_config(run / "config.yaml", plugins=[run / "evil.py"])
    assert mark.exists(), "what is named on the command line is trusted"


def test_checkpoints_of_earlier_releases_are_read(tmp_path: Path) -> None:
    state = {"model": {"a.b": torch.randn(3, 4), "scalar": torch.tensor(2.5)}, "tables": {"item": torch.arange(10)}}
    folder = tmp_path / "step-1"
    folder.mkdir()
    as_dcp(folder, state)
    empty = {"model": {"a.b": torch.zeros(3, 4), "scalar": torch.zeros(())}, "tables": {"item": torch.zeros(10).long()}}
    load_tensors(empty, folder)
    assert torch.equal(empty["model"]["a.b"], state["model"]["a.b"]) and empty["model"]["scalar"] == 2.5
    assert torch.equal(empty["tables"]["item"], state["tables"]["item"])
    assert stored_names(folder) == {"model.a.b", "model.scalar", "tables.item"}


def test_the_tensors_are_safetensors_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"a": torch.randn(3, 4), "b": torch.tensor(7), "c": torch.randn(2, 3).bfloat16(), "d": torch.zeros(0, 4)}
    save_tensors(state, tmp_path / "step-1")
    loaded = safetensors.load_file(tmp_path / "step-1/part-0.safetensors")
    assert loaded.keys() == state.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in state.items()
    )


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save_tensors({"a": torch.randn(3, 4)}, tmp_path / "step-1")
    with pytest.raises(UserError, match=r"a has the shape \[3, 4\] there, and \[4, 4\] in this model"):
        load_tensors({"a": torch.zeros(4, 4)}, tmp_path / "step-1")
    with pytest.raises(UserError, match=r"it has no b\."):
        load_tensors({"b": torch.zeros(4, 4)}, tmp_path / "step-1")


def test_links_in_a_run_folder_are_not_written_through(run: Path, trained: Path, tmp_path: Path) -> None:
    """A folder from somebody else may hold links to files of ours under the names of results."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (run / "positions").mkdir(exist_ok=True)
    for name in (
        "evaluation.json",
        "samples.json",
        "positions/test-step-8.npz",
        "report.html",
        "config.yaml",
        "run.json",
    ):
        content = (run / name).read_bytes() if name in ("config.yaml", "run.json") else b"mine"
        (run / name).unlink(missing_ok=True)
        aside = tmp_path / Path(name).name
        aside.write_bytes(content)
        (run / name).symlink_to(aside if content != b"mine" else mine)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    assert cli.main(["evaluate", str(run)]) == 0
    assert cli.main(["report", str(run)]) == 0
    resume(run, trained)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(mine)
    with pytest.raises(UserError, match=r"metrics\.jsonl is a symbolic link"):
        resume(run, trained, epochs=5)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("row", [-1, 40, 2**31 - 1])
def test_items_that_a_store_does_not_have_are_an_error_that_names_it(row: int, run: Path, tmp_path: Path) -> None:
    store = write_store(tmp_path / "damaged")
    items = np.load(store.path / "items.npy", mmap_mode="r+")
    items[:] = row
    items.flush()
    del items
    with pytest.raises(
        UserError, match=rf"damaged is damaged: an event is of the item in row {row}.*inspect .* --verify"
    ):
        train(constant_lr(), store.path, tmp_path / "out")
    assert cli.main(["evaluate", str(run), "--data", str(store.path)]) == 2
