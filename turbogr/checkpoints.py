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
from typing import Any

from turbogr.errors import UserError
from turbogr.files import remove_abandoned_files, replace_text, sync_folder
from turbogr.parallel.tensor_files import load_tensors, missing_files, save_tensors, stored_names
from turbogr.parallel.world import World
from turbogr.progress import Progress

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
            UserError: the disk is full; earlier checkpoints are untouched.
            OSError: it cannot be written for another reason; it names a path in the checkpoint's own folder.
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
                sync_folder(aside)
                os.rename(aside, final)
                sync_folder(self.folder.parent)
                sync_folder(self.folder)  # before best.json may name it and older ones are removed
            self.note_best(progress)
            sync_folder(self.folder)
            self._remove_old(progress)

        self.world.run_on_first(prepare)
        try:
            if not self._first_says(final.exists()):
                save_tensors(state, aside)
            self.world.run_on_first(publish)
        except BaseException as error:
            if self.world.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError):
                raise _about(error, aside, final) from error
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
        progress, folder = self.progress(step), self.path(step)
        is_first_layout = "table.weight" in stored_names(folder)
        load_tensors(_in_first_layout(state) if is_first_layout else state, folder)
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
                self._remove(step)

    def _remove(self, step: int) -> None:
        doomed = self.folder / f".step-{step}.old"
        os.rename(self.path(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint that must not be resumed from."""
        self.world.run_on_first(lambda: self._remove(step))

    def sweep(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        if self.world.is_first and self.folder.is_dir():
            for entry in self.folder.iterdir():
                if entry.name.startswith(".step-"):
                    shutil.rmtree(entry, ignore_errors=True)
            for folder in (self.folder, *map(self.path, self.steps())):
                remove_abandoned_files(folder)


def _in_first_layout(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a `state` under the names of release 0.1, which had a single table."""
    (table,) = state["tables"].values()
    renamed = {name: part for name, part in state.items() if name not in ("tables", "task", "past_tables")}
    renamed["table"] = {"weight": table["weight"]}
    if "optimizer" in table:
        renamed["row_optimizer"] = table["optimizer"]
    if "task" in state:
        renamed["negatives"] = state["task"]
    if "past_tables" in state:
        renamed["earlier"] = {
            name.replace("missing_", "lacking_"): next(iter(tables.values()))  # words: allow
            for name, tables in state["past_tables"].items()
        }
    return renamed


def _about(error: OSError, aside: Path, final: Path) -> Exception:
    """Return an error of writing a checkpoint in terms of `final`, the folder that the user knows, not of `aside`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "disk is full" if error.errno == errno.ENOSPC else "disk quota is used up"
        return UserError(
            f"the checkpoint {final} could not be written, because the {what}; earlier checkpoints are kept. Free some "
            "space and continue with --resume; a smaller train.keep_checkpoints needs less"
        )
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    if path is None or not path.is_relative_to(aside):
        return error
    return OSError(error.errno, error.strerror, str(final / path.relative_to(aside)))
