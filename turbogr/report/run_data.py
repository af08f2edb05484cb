"""What a report shows of a run folder, and a list of what is missing or damaged.

Only config.yaml and run.json must exist. A run may still be training or may have been killed, so the last line of
metrics.jsonl may be incomplete. A file that cannot be read is named on the page; the rest of the page is shown.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turbogr.data.item_info import ItemInfo
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.plot import Span
from turbogr.report import wording
from turbogr.report.timeline_figure import last_steps
from turbogr.runs import MetricLog, Record, RunFolder, protocol_text


@dataclass(frozen=True)
class RunData:
    """The content of a run folder; `problems` are sentences about what could not be read or does not fit together.

    `evaluation` is what the page shows as the result, in the form of evaluation.json; it and `samples` may be None.
    `bad_steps` are records of steps left out because a value was not finite, `stragglers` of slow ranks. `profile` has
    milliseconds by operator; it is empty if no step was profiled. `spans` is what ran during some steps. `data` is
    where the store is now if it was moved. `delivered` is delivered.json, None for a run without one; `refused` says by
    name why a simple method was not measured.
    """

    folder: RunFolder
    config: Record
    info: Record
    training: list[Record]
    evaluations: list[Record]
    evaluation: Record | None
    samples: list[Record] | None
    profile: dict[str, float]
    spans: list[Span]
    problems: list[str]
    data: Path | None = None
    delivered: Record | None = None
    refused: dict[str, str] = field(default_factory=dict)
    bad_steps: list[Record] = field(default_factory=list)
    stragglers: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | str, data: Path | str | None = None) -> RunData:
        """Read the run folder at `path`; `data` is where its store is now if it was moved.

        Raises:
            UserError: `path` is not a run folder, or its config.yaml or run.json cannot be read.
        """
        folder = RunFolder.open(path)
        path = folder.path
        problems: list[str] = []
        log = MetricLog.read(path)
        if log.unreadable:
            problems.append(_unreadable_lines(log.unreadable))
        samples = _read_optional(path / "samples.json", problems)
        users = samples.get("users") if samples else None
        evaluation = _best_evaluation(path, samples if isinstance(users, list) else None, problems)
        return cls(
            folder=folder,
            config=folder.settings(),
            info={**(_read_optional(path / "environment.json", problems) or {}), **folder.record},
            training=log.training,
            evaluations=log.evaluations,
            evaluation=evaluation,
            samples=[user for user in users if isinstance(user, dict)] if isinstance(users, list) else None,
            profile=_milliseconds(_read_optional(path / "profile.json", problems)),
            spans=last_steps(_read_optional(path / "timeline.json", problems)),
            problems=problems,
            data=None if data is None else Path(data),
            delivered=_read_optional(path / "delivered.json", problems),
            refused=_refused(path),
            bad_steps=log.bad_steps,
            stragglers=log.stragglers,
        )

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @functools.cached_property
    def store(self) -> Store:
        """The store of the run.

        Raises:
            UserError: it is gone, empty, or holds other data.
        """
        store = self.folder.store(self.data)
        if store.num_users == 0 or store.num_items == 0:
            raise UserError(f"{store.path} is empty")
        return store

    @functools.cached_property
    def item_info(self) -> ItemInfo | None:
        """Titles of the items, None where there are none or the store cannot be opened."""
        try:
            return ItemInfo.of(self.store)
        except UserError as error:
            if (self.data or Path(str(self.part("data").get("path")))).exists():
                self.problems.append(wording.sentence(f"no titles: {error}"))
            return None

    @property
    def predicts_actions(self) -> bool:
        """Whether what was measured are predicted actions, not recommended items."""
        return bool((self.evaluation or {}).get("details"))

    def setting(self, section: str, name: str) -> Any:
        """Return a value of the config, or None."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    def part(self, section: str) -> Record:
        """Return an object of run.json or environment.json, empty when it is not there."""
        values = self.info.get(section)
        return values if isinstance(values, dict) else {}


def _milliseconds(profile: Record | None) -> dict[str, float]:
    entries = (profile or {}).get("milliseconds")
    known = {str(name): wording.number(value) for name, value in entries.items()} if isinstance(entries, dict) else {}
    return {name: value for name, value in known.items() if math.isfinite(value) and value > 0}


def _read_optional(path: Path, problems: list[str]) -> Record | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path.name} cannot be read ({error}).")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path.name} does not hold a JSON object.")
        return None
    return content


def _best_evaluation(path: Path, samples: Record | None, problems: list[str]) -> Record | None:
    """Return the evaluation of the best checkpoint: evaluation.json, or summary.json where that is of another one.

    A run that was resumed after `turbogr evaluate` may have a better checkpoint than the one in evaluation.json. If
    neither file is of the best checkpoint, the later one is returned and `problems` says so.
    """
    evaluation = _read_optional(path / "evaluation.json", problems)
    summary = _of_summary(_read_optional(path / "summary.json", problems))
    best = (_read_optional(path / "checkpoints" / "best.json", problems) or {}).get("step")
    if best is None:
        return evaluation or summary
    found = {"evaluation.json": evaluation, "summary.json": summary}
    measured = {name: content for name, content in found.items() if content is not None}
    renew = f"Renew it with: turbogr evaluate {path}"
    current = [content for content in measured.values() if content.get("step") == best]
    if current:
        if evaluation is not None and evaluation.get("step") != best:
            old = samples is not None and samples.get("step", evaluation.get("step")) != best
            too = ", and so are the recommendations" if old else ""
            problems.append(
                f"evaluation.json is of {_checkpoint(evaluation)}{too}; the metrics are those of summary.json, of "
                f"the best checkpoint (step {wording.count(best)}). {renew}"
            )
        return current[0]
    if not measured:
        return None
    name, latest = max(measured.items(), key=lambda entry: _step(entry[1]))
    problems.append(
        f"The result is of {_checkpoint(latest)} ({name}), not of the best checkpoint (step {wording.count(best)}), "
        f"which has not been measured. {renew}"
    )
    return latest


def _of_summary(summary: Record | None) -> Record | None:
    """Return summary.json in the form of evaluation.json."""
    if summary is None:
        return None
    part = str(summary.get("part", "test"))
    kept = {"step": summary.get("step"), "num_users": summary.get("num_users"), "protocol": protocol_text(summary)}
    # Where the model is delivered, both have the same metrics, and so have summaries that know of no other.
    differs = summary.get("model_metrics", summary.get("metrics")) != summary.get("metrics")
    own = {"delivered": "", "model": "model_"} if differs else {"model": ""}
    parts = {part: _systems(summary, {name: f"{key}metrics" for name, key in own.items()}, "baselines")}
    keys = {name: f"{key}standard_errors" for name, key in own.items()}
    errors = {part: _systems(summary, keys, "baseline_standard_errors")}
    found = {**kept, "parts": parts, "standard_errors": errors, "coverage": {part: summary.get("coverage")}}
    return {**found, "details": {part: summary["details"]}} if summary.get("details") else found


def _systems(summary: Record, own: Mapping[str, str], of_baselines: str) -> Record:
    """Return values of the run's `own` systems, by their keys in the summary, and of the baselines."""
    baselines = summary.get(of_baselines)
    values = {name: summary.get(key) for name, key in own.items()}
    return {**values, **(baselines if isinstance(baselines, dict) else {})}


def _refused(path: Path) -> dict[str, str]:
    found = (_read_optional(path / "summary.json", []) or {}).get("baselines_refused")
    return {str(name): str(reason) for name, reason in found.items()} if isinstance(found, dict) else {}


def _step(evaluation: Record) -> float:
    step = wording.number(evaluation.get("step"))
    return step if math.isfinite(step) else -1.0


def _checkpoint(evaluation: Record) -> str:
    step = _step(evaluation)
    return f"the checkpoint of step {wording.count(step)}" if step >= 0 else "an unknown checkpoint"


def _unreadable_lines(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5]) + (", …" if len(numbers) > 5 else "")
    word = "line" if len(numbers) == 1 else "lines"
    return f"metrics.jsonl: {len(numbers)} unreadable {word} left out ({shown})."
