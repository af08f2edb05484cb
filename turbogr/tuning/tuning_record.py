"""tune.json: what was tried and measured, kept up to date during the search, from which it continues; and its table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turbogr.bench.record import Table
from turbogr.errors import UserError
from turbogr.evaluation.baseline_titles import title_of
from turbogr.files import replace_text
from turbogr.tuning.halving import Trial

FILE = "tune.json"


@dataclass
class TuningRecord:
    """A search: what it is of (`about`: data, recipe, settings), the trials, and the simple methods on the same items.

    `seconds` have been spent in all, also before an interruption. `best` is the trial in the folder best. `simple` has
    (value, standard error) by method, None before it was measured; `notes` are sentences for the reader.
    """

    about: dict[str, Any]
    metric: str
    num_users: int
    seconds: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    simple: dict[str, tuple[float, float | None]] | None = None
    simple_seconds: float = 0.0
    best: str | None = None
    delivered: str | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write tune.json, atomically."""
        replace_text(folder / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> TuningRecord | None:
        """Return the record of a search in a folder; None if there is none.

        Raises:
            UserError: the file is damaged.
        """
        try:
            raw = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise _damaged(folder) from None
        try:
            trials = [
                Trial(**{**trial, "settings": tuple((str(key), str(value)) for key, value in trial["settings"])})
                for trial in raw["trials"]
            ]
            return cls(**{**raw, "trials": trials})
        except (KeyError, TypeError, ValueError):
            raise _damaged(folder) from None

    def check_same(self, about: dict[str, Any], folder: Path) -> None:
        """Raise UserError if the folder holds a search of something else."""
        for key, value in about.items():
            if self.about.get(key) != value:
                shown = f" ({_listed(self.about.get(key))}, not {_listed(value)})" if key == "settings" else ""
                another = "other settings" if key == "settings" else f"another {key}" if key != "data" else "other data"
                raise UserError(f"{folder} holds a search with {another}{shown}; choose another --out, or remove it")

    def table(self, *, higher_is_better: bool) -> Table:
        """Return the trials that were measured, the best first, and the simple methods among them."""
        rows: list[tuple[float, list[str]]] = []
        for trial in self.trials:
            if trial.newest is not None:
                epochs = f"{trial.epochs:g}" + ("" if trial.of_epochs is None else f" of {trial.of_epochs}")
                shown = ", ".join(f"{key}={value}" for key, value in trial.settings) or "the recipe"
                line = [trial.name, shown, epochs, _value(trial.value, trial.standard_error), f"{trial.seconds:.0f}"]
                rows.append((trial.value, line))
        for name, (value, error) in (self.simple or {}).items():
            rows.append((value, [title_of(name), "a simple method", "-", _value(value, error), "-"]))
        rows.sort(key=lambda row: -row[0] if higher_is_better else row[0])
        title = f"{len(self.trials)} trials and the simple methods"
        return Table(
            title, ["trial", "settings", "epochs", f"{self.metric} (validation)", "seconds"], [row for _, row in rows]
        )


def _value(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _listed(settings: Any) -> str:
    return ", ".join(map(str, settings or ())) or "none"


def _damaged(folder: Path) -> UserError:
    return UserError(f"{folder / FILE} is damaged; remove {folder} to search again, or choose another --out")
