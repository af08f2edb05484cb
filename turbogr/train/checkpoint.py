"""Which checkpoints a run keeps, and how to load one.

A checkpoint is `checkpoints/step-N/`: DCP files with the tensors and `progress.json`. It is written aside and renamed,
so a folder of that name is always whole, and it is never overwritten: a second save at the same step has the same
tensors and replaces only its progress. `best.json` names the best step so far, which is never removed.

With many ranks all of them call the methods of `Checkpoints` together: every rank writes and reads its part of the
tensors, and rank 0 alone does the rest. The folder must be the same on all of them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from turbogr.config import Config, load_config
from turbogr.errors import UserError
from turbogr.files import replace_text
from turbogr.layers.item_table import ItemTable
from turbogr.models import RetrievalModel
from turbogr.parallel.checkpoint import load_tensors, missing_files, save_tensors
from turbogr.parallel.world import World
from turbogr.train.progress import Progress

_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, keep: int = 2, world: World | None = None) -> None:
        self.folder, self.keep, self.world = run / "checkpoints", keep, world or World()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(self, state: dict[str, Any], progress: Progress) -> None:
        """Write a checkpoint of the current step, note the best one, and remove those no longer kept.

        Raises:
            OSError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        final = self.path(progress.step)
        aside = self.folder / f".{final.name}.part"

        def prepare() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if final.exists():
                replace_text(final / "progress.json", progress.to_json())
            else:
                shutil.rmtree(aside, ignore_errors=True)

        def publish() -> None:
            if not final.exists():
                if missing := missing_files(aside):
                    raise OSError(errno.ENOENT, "a rank wrote its part of the checkpoint elsewhere", aside / missing[0])
                replace_text(aside / "progress.json", progress.to_json())
                os.rename(aside, final)
                _sync_folder(self.folder)
            self.note_best(progress)
            self._remove_old(progress)

        self.world.on_first(prepare)
        try:
            if not self._first_says(final.exists()):
                save_tensors(state, aside)
            self.world.on_first(publish)
        except BaseException:
            if self.world.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _first_says(self, value: Any) -> Any:
        """What rank 0 sees: a shared file system may show others an older state."""
        return self.world.gather_objects(value)[0]

    def newest(self) -> int | None:
        """Step of the newest checkpoint, None without one."""
        steps = self.steps()
        newest: int | None = self._first_says(steps[-1] if steps else None)
        return newest

    def best(self) -> int | None:
        """Step of the best checkpoint, None before the first evaluation."""
        try:
            step = json.loads((self.folder / "best.json").read_text(encoding="utf-8"))["step"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / 'best.json'} is damaged; remove it and use the last checkpoint") from error
        return step if self.path(step).is_dir() else None

    def progress(self, step: int) -> Progress:
        """Read where the run stood at a checkpoint."""
        folder = self.path(step)
        try:
            return Progress.from_json((folder / "progress.json").read_text(encoding="utf-8"), str(folder))
        except OSError as error:
            raise UserError(
                f"{folder} has no progress.json; remove the folder to fall back to an earlier one"
            ) from error

    def restore(self, state: dict[str, Any], step: int) -> Progress:
        """Load the tensors of a checkpoint into `state`, in place, and return its progress."""
        progress = self.progress(step)
        load_tensors(state, self.path(step))
        return progress

    def note_best(self, progress: Progress) -> None:
        """Write best.json as `progress` knows it, on rank 0; without a best step there is none."""
        if not self.world.is_first:
            return
        if progress.best_step is None:
            (self.folder / "best.json").unlink(missing_ok=True)
            return
        best = {"step": progress.best_step, "epoch": progress.best_epoch, "value": progress.best_value}
        replace_text(self.folder / "best.json", json.dumps(best) + "\n")

    def _remove_old(self, progress: Progress) -> None:
        for step in self.steps()[: -self.keep]:
            if step != progress.best_step:
                doomed = self.folder / f".step-{step}.old"
                os.rename(self.path(step), doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        if self.world.is_first and self.folder.is_dir():
            for entry in self.folder.iterdir():
                if entry.name.startswith(".step-"):
                    shutil.rmtree(entry, ignore_errors=True)


def load_for_inference(
    run: Path, which: Literal["best", "last"] = "best"
) -> tuple[RetrievalModel, ItemTable, Config, dict[str, Any]]:
    """Load the model and item table of a run, on the CPU; info has `step`, `epoch`, `which` and run.json as `run`.

    A run without an evaluation yet has no best checkpoint; its last one is loaded then, and `which` says so.

    Raises:
        UserError: not a run folder, or one without a checkpoint.
    """
    run = Path(run)
    record = read_run_record(run)
    config = load_config(run / "config.yaml")
    checkpoints = Checkpoints(run)
    step = checkpoints.best() if which == "best" else None
    found = "best" if step is not None else "last"
    step = checkpoints.newest() if step is None else step
    if step is None:
        raise UserError(f"{run} has no checkpoint yet; train it first with `turbogr train`")
    assert config.model.dim is not None
    model = RetrievalModel(config.model)
    table = ItemTable(int(record["data"]["num_items"]), config.model.dim)
    progress = checkpoints.restore({"model": dict(model.named_parameters()), "table": {"weight": table.weight}}, step)
    model.eval().requires_grad_(False)
    epoch = progress.best_epoch if found == "best" else progress.loader["epoch"]
    return model, table, config, {"step": step, "epoch": epoch, "which": found, "run": record}


def read_run_record(run: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        UserError: the folder is not a run.
    """
    try:
        record: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a run folder (it has no run.json)" if run.exists() else "does not exist"
        raise UserError(f"{run} {what}; make one with `turbogr train RECIPE --data DIR --out {run}`") from None
    except ValueError as error:
        raise UserError(f"{run / 'run.json'} is damaged: {error}") from error
    return record


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
