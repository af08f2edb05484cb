"""Reading a run folder for people: whatever is there, and a list of what is missing or damaged.

Only config.yaml and run.json must be there. A run may still be training or may have been killed, so the last line of
metrics.jsonl may be cut short; anything that cannot be read is told on the page instead of failing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from turbogr.errors import UserError
from turbogr.report import wording
from turbogr.report.charts import Stretch
from turbogr.report.timeline import last_steps

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run folder in memory; `problems` says what could not be read or does not belong together.

    `evaluation` is what the page shows as the result, in the form of evaluation.json; it and `samples` may be None.
    `profile` has milliseconds by operator, and is empty when no step was profiled. `spans` is what ran during some
    steps.
    """

    path: Path
    name: str
    config: Record
    info: Record
    train: list[Record]
    evals: list[Record]
    evaluation: Record | None
    samples: list[Record] | None
    profile: dict[str, float]
    spans: list[Stretch]
    problems: list[str]

    @classmethod
    def read(cls, path: Path | str) -> Run:
        """Read the run folder at `path`.

        Raises:
            UserError: `path` is not a run folder, or its config.yaml or run.json cannot be read.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}; name a run folder, as written by `turbogr train ... --out RUN`")
        absent = [name for name in ("run.json", "config.yaml") if not (path / name).is_file()]
        if absent:
            raise UserError(
                f"{path} is not a run folder (it has no {' and no '.join(absent)}); name one of `turbogr train`"
            )
        problems: list[str] = []
        records = _read_lines(path / "metrics.jsonl", problems)
        samples = _read_optional(path / "samples.json", problems)
        users = samples.get("users") if samples else None
        evaluation = _best_evaluation(path, has_samples=isinstance(users, list), problems=problems)
        return cls(
            path=path,
            name=path.resolve().name,
            config=_read_config(path / "config.yaml"),
            info={**(_read_optional(path / "environment.json", problems) or {}), **_read_info(path / "run.json")},
            train=_last_attempt(records, "train"),
            evals=_last_attempt(records, "eval"),
            evaluation=evaluation,
            samples=[user for user in users if isinstance(user, dict)] if isinstance(users, list) else None,
            profile=_milliseconds(_read_optional(path / "profile.json", problems)),
            spans=last_steps(_read_optional(path / "timeline.json", problems)),
            problems=problems,
        )

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


def _read_config(path: Path) -> Record:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it must hold sections of settings")
    return config


def _read_info(path: Path) -> Record:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(info, dict):
        raise UserError(f"{path} is damaged: it must hold a JSON object")
    return info


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


def _best_evaluation(path: Path, *, has_samples: bool, problems: list[str]) -> Record | None:
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
            samples = ", and so are the recommendations" if has_samples else ""
            problems.append(
                f"evaluation.json is of {_checkpoint(evaluation)}{samples}; the metrics are those of summary.json, of "
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
    baselines = summary.get("baselines")
    systems = {"model": summary.get("metrics"), **(baselines if isinstance(baselines, dict) else {})}
    kept = {key: summary.get(key) for key in ("step", "num_users", "protocol")}
    return {**kept, "parts": {str(summary.get("part", "test")): systems}}


def _step(evaluation: Record) -> float:
    step = wording.number(evaluation.get("step"))
    return step if math.isfinite(step) else -1.0


def _checkpoint(evaluation: Record) -> str:
    step = _step(evaluation)
    return f"the checkpoint of step {wording.count(step)}" if step >= 0 else "an unknown checkpoint"


def _read_lines(path: Path, problems: list[str]) -> list[Record]:
    records, damaged = [], []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged.append(place)
    if damaged:
        places = ", ".join(str(place) for place in damaged[:5]) + (", …" if len(damaged) > 5 else "")
        word = "line" if len(damaged) == 1 else "lines"
        problems.append(f"metrics.jsonl: {len(damaged)} unreadable {word} left out ({places}).")
    return records


def _last_attempt(records: list[Record], kind: str) -> list[Record]:
    """Return the records of one kind in step order; where a resumed run repeats steps, its later records count."""
    latest: dict[tuple[Any, float], Record] = {}
    for record in records:
        step = record.get("step")
        if record.get("kind") == kind and isinstance(step, (int, float)):
            latest[record.get("part"), step] = record
    return sorted(latest.values(), key=lambda record: record["step"])
