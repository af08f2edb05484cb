"""Which checkpoints a run keeps, and how to load one.

A checkpoint is `checkpoints/step-N/`: files with the tensors (`parallel/tensor_files.py`) and `progress.json`. It is
written aside and renamed, so a folder of that name is always whole, and it is never overwritten: a second save at the
same step has the same tensors and replaces only its progress. `best.json` names the best step so far, which is never
removed. A save may run in the background (`checkpoint_writer.py`). Every file has a checksum, and a checkpoint is
compared with them before it is used. A damaged one is refused; a run that is resumed uses the one before.

With many ranks all of them call the methods of `Checkpoints` together: every rank writes and reads its part of the
tensors, and rank 0 alone does the rest. The folder must be the same on all of them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbogr.checkpoint_writer import Copies, PendingSave, about_checkpoint, agreed_writers, publish_folder
from turbogr.checksums import Damaged, is_sealed, sealed, unsealed
from turbogr.errors import Note, UserError, warn_caller
from turbogr.files import remove_abandoned_files, replace_text, sync_folder
from turbogr.parallel.tensor_files import damages, load_tensors, own_rows, stored_names
from turbogr.parallel.world import World
from turbogr.progress import NewerCheckpoint, Progress

_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, keep: int = 2, world: World | None = None) -> None:
        self.folder, self.keep, self.world = run / "checkpoints", keep, world or World()
        self._copies = Copies()
        self._pending: PendingSave | None = None
        self._intact: set[int] = set()  # steps whose files were compared with their checksums by this process

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make the buffers in which saves in the background copy such a state, in a thread."""
        self._copies.prepare(own_rows(state, self.world.rank))

    def wait_until_prepared(self) -> None:
        """Wait for the thread of `prepare`, if there is one."""
        self._copies.wait_until_prepared()

    def save(self, state: Mapping[str, Any], progress: Progress, *, background: bool = False) -> None:
        """Write a checkpoint of the current step, note the best one, and remove those no longer kept.

        With `background` it returns when the state is copied and may change; a thread writes the copy. `finish` waits
        for it and raises its error, as the next `save` does; `failed` says early that there is one.

        Raises:
            UserError: the disk is full; earlier checkpoints are untouched.
            OSError: it cannot be written for another reason; it names a path in the checkpoint's own folder.
        """
        self.finish()
        final = self.path(progress.step)
        aside = self.folder / f".{final.name}.part"
        parts = own_rows(state, self.world.rank)
        everyone = self.world.gather_objects((final.exists(), bool(parts)))
        exists = everyone[0][0]
        writer, num_writers = agreed_writers([writes for _, writes in everyone], self.world.rank)
        progress = copy.deepcopy(progress)

        def prepare() -> None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if exists:
                    replace_text(final / "progress.json", progress.to_json())
                    tidy()
                else:
                    shutil.rmtree(aside, ignore_errors=True)
                    aside.mkdir()
            except OSError as error:
                raise about_checkpoint(error, aside, final) from error

        def publish() -> None:
            publish_folder(aside, final, progress.to_json())
            tidy()

        def tidy() -> None:
            self.note_best(progress)
            sync_folder(self.folder)
            self._remove_old(progress)

        self.world.run_on_first(prepare)
        if exists:
            return
        self._intact.discard(progress.step)
        copies = self._copies.of(parts) if background else None
        self._pending = PendingSave(
            parts if copies is None else copies,
            aside,
            final,
            writer=writer,
            num_writers=num_writers,
            publish=publish if self.world.is_first else None,
        )
        if not background:
            self.finish()
        elif copies is None:
            self._pending.written.wait()

    @property
    def failed(self) -> bool:
        """Whether this rank already knows that the save in the background has failed."""
        return self._pending is not None and self._pending.failed

    def finish(self) -> None:
        """Wait until the save in the background, if there is one, is done; all ranks call it together.

        Raises:
            UserError, OSError: it has failed on some rank, as `save` raises it.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.written.wait()
            self.world.run_on_all(pending.check)
            self.world.run_on_first(pending.end)
            self.world.run_on_all(pending.check)
        except BaseException:
            pending.abandon()
            if self.world.is_first:
                pending.clean()
            raise
        finally:
            self._pending = None

    def abandon(self) -> None:
        """Let a save in the background end where the run has failed; no other rank is needed, and nothing raises."""
        self._copies.end_preparing()
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def _first_says(self, value: Any) -> Any:
        """What rank 0 sees: a shared file system may show others an older state."""
        return self.world.gather_objects(value)[0]

    def newest(self) -> int | None:
        """Step of the newest checkpoint, None without one."""
        steps = self.steps()
        newest: int | None = self._first_says(steps[-1] if steps else None)
        return newest

    def newest_intact(self) -> int | None:
        """Step of the newest checkpoint that is as it was written; ranks share the work. None without any checkpoint.

        Damaged ones are named, and renamed to `damaged-step-N`, so that the run can write these steps again.

        Raises:
            UserError: all are damaged, or a later release wrote one.
        """
        damaged: dict[int, list[str]] = {}
        steps: list[int] = self._first_says(self.steps())
        for step in reversed(steps):
            found = self.find_damages(step)
            if not found:
                for other, sentences in damaged.items():
                    self.put_away(other, sentences, f"the run continues from step {step:,}")
                return step
            damaged[step] = found
        if not steps:
            return None
        every = "; ".join(sentence for sentences in damaged.values() for sentence in sentences)
        raise Damaged(
            f"no checkpoint of {self.folder} can be used, as all are damaged: {every}. Copy the folder from where it "
            "is whole, or start a new run in another --out"
        )

    def find_damages(self, step: int) -> list[str]:
        """Return sentences about the damaged files of a checkpoint, the same on all ranks, which share the work."""
        found = damages(self.path(step), (self.world.rank, self.world.size))
        if self.world.is_first:
            try:
                self.progress(step)
            except NewerCheckpoint:
                raise
            except UserError as error:
                found = [str(error), *found]
        everyone = [sentence for part in self.world.gather_objects(found) for sentence in part]
        if not everyone:
            self._intact.add(step)
        return list(dict.fromkeys(everyone))

    def put_away(self, step: int, sentences: list[str], then: str) -> None:
        """Rename a damaged checkpoint to `damaged-step-N`, so that its step can be saved again, and say so."""
        path = self.path(step)
        target = path.with_name(f"damaged-{path.name}")

        def rename() -> None:
            shutil.rmtree(target, ignore_errors=True)
            os.rename(path, target)
            sync_folder(self.folder)
            warn_caller(f"{path} is damaged: {'; '.join(sentences)}. It is now {target}, and {then}", Note)

        self.world.run_on_first(rename)

    def best(self) -> int | None:
        """Step of the best checkpoint, None before the first evaluation."""
        try:
            data = (self.folder / "best.json").read_bytes()
            best = unsealed(data, "best.json") if is_sealed(data) else json.loads(data)
            step: int = best["step"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / 'best.json'} is damaged; remove it and use the last checkpoint") from error
        return step if self.path(step).is_dir() else None

    def progress(self, step: int) -> Progress:
        """Read where the run stood at a checkpoint."""
        folder = self.path(step)
        try:
            return Progress.from_json((folder / "progress.json").read_bytes(), str(folder))
        except OSError as error:
            raise UserError(
                f"{folder} has no progress.json; remove the folder to fall back to an earlier one"
            ) from error

    def restore(self, state: dict[str, Any], step: int) -> Progress:
        """Load the tensors of a checkpoint into `state`, in place, and return its progress.

        Its files are compared with their checksums first, unless they have been already (`newest_intact`).

        Raises:
            Damaged: they differ.
        """
        progress, folder = self.progress(step), self.path(step)
        if step not in self._intact:
            if found := damages(folder):
                raise Damaged(f"the checkpoint {folder} is damaged: {'; '.join(found)}. {_remedy(self.steps(), step)}")
            self._intact.add(step)
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
        replace_text(self.folder / "best.json", sealed(best))

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


def _remedy(steps: list[int], step: int) -> str:
    """What to do about a damaged checkpoint of which others may use another one."""
    others = [other for other in steps if other != step]
    copy = "Copy it again from where it is whole"
    return f"{copy}, or `turbogr train --resume`, which uses an earlier one" if others else copy
