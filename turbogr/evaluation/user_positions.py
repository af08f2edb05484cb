"""Results by user: the positions of the held-out items of every user, under the model and under each baseline.

They are stored in the run folder, one compressed file per checkpoint and part, so that a report can compare runs user
by user and split metrics by kinds of users without measuring again. What it needs of the store is stored with them.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.evaluation.held_out import HeldOut
from turbogr.evaluation.metrics import MISSED
from turbogr.evaluation.user_sample import UserSample
from turbogr.files import atomic_file

FOLDER = "positions"
MODEL = "model"
DELIVERED = "delivered"
"""The system that a run recommends with, where that is not its model alone."""

_SYSTEM = "positions."
_SAFE = re.compile(r"[A-Za-z0-9_.@+-]+")


@dataclass(frozen=True)
class Measured:
    """Metrics of one system, with their standard errors and the `positions` [n] behind them where the task has any.

    `metrics_exclude_seen` and `metrics_include_seen` are those without and with the users' earlier items among the
    candidates, one of which is `metrics`; None for tasks that do not recommend items. `details` are what a task that
    predicts actions has to show of them, by what it predicts.
    """

    metrics: dict[str, float]
    standard_errors: dict[str, float] = field(default_factory=dict)
    positions: Int64Array | None = None
    metrics_exclude_seen: dict[str, float] | None = None
    metrics_include_seen: dict[str, float] | None = None
    details: dict[str, Any] | None = None

    @classmethod
    def of(cls, result: Any) -> Measured:
        """Return what a task's measurement has of these."""
        errors: dict[str, float] = getattr(result, "standard_errors", {})
        optional = ("positions", "metrics_exclude_seen", "metrics_include_seen", "details")
        return cls(result.metrics, errors, *(getattr(result, name, None) for name in optional))


@dataclass(frozen=True)
class UserPositions:
    """Positions [n] of the held-out items of `users` [n] (store rows) by system; MISSED where it was no candidate.

    `history_lengths` [n] count a user's events before the held-out one, `target_counts` [n] the training events of the
    held-out item.
    """

    part: str
    step: int
    users: Int64Array
    history_lengths: Int64Array
    target_counts: Int64Array
    positions: dict[str, Int64Array]

    @property
    def main(self) -> str:
        """The system that the run recommends with: its model unless it delivers something else."""
        return main_system(self.positions)

    @classmethod
    def of(
        cls,
        store: Store,
        split: Split,
        part: str,
        step: int,
        measured: Mapping[str, Measured],
        sample: UserSample | None = None,
    ) -> UserPositions | None:
        """Collect the positions of the systems that have some, of the users of `sample`; None if the model has none."""
        positions = {name: system.positions for name, system in measured.items() if system.positions is not None}
        if MODEL not in positions:
            return None
        held_out = HeldOut.of(store, split, part, sample=sample)
        assert all(len(found) == len(held_out) for found in positions.values()), "one position per held-out item"
        counts = store.item_counts(split.train_end)
        lengths = held_out.events - held_out.starts
        return cls(part, step, held_out.users, lengths, counts[held_out.targets], positions)

    def write(self, run: Path) -> Path:
        """Write RUN/positions/PART-step-N.npz, atomically; MISSED is stored as 0."""
        path = file_of(run, self.part, self.step)
        path.parent.mkdir(exist_ok=True)
        arrays = {
            "users": self.users,
            "history_lengths": self.history_lengths,
            "target_counts": self.target_counts,
            **{f"{_SYSTEM}{name}": np.where(p == MISSED, 0, p) for name, p in self.positions.items()},
        }
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **{name: _narrow(values) for name, values in arrays.items()})  # type: ignore[arg-type]
        return path

    @classmethod
    def read(cls, run: Path, part: str, step: int) -> UserPositions | None:
        """Return the positions of one checkpoint on one part; None if there are none or the file is damaged."""
        try:
            with np.load(file_of(run, part, step), allow_pickle=False) as file:
                arrays = {name: file[name].astype(np.int64) for name in file.files}
            systems = {name[len(_SYSTEM) :]: found for name, found in arrays.items() if name.startswith(_SYSTEM)}
            positions = {name: np.where(found == 0, MISSED, found) for name, found in systems.items()}
            columns = (arrays["users"], arrays["history_lengths"], arrays["target_counts"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        whole = all(len(found) == len(columns[0]) for found in (*columns, *positions.values()))
        return cls(part, step, *columns, positions) if whole and MODEL in positions else None


def file_of(run: Path, part: str, step: int) -> Path:
    """Return where the positions of a checkpoint on a part are stored."""
    assert _SAFE.fullmatch(part), part
    return run / FOLDER / f"{part}-step-{step}.npz"


def _narrow(values: Int64Array) -> Any:
    return values.astype(np.uint32) if len(values) == 0 or values.max() < 2**32 else values


def main_system(systems: Container[str]) -> str:
    """Return which of the measured systems a run recommends with."""
    return DELIVERED if DELIVERED in systems else MODEL
