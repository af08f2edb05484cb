"""What is left of a job under faults, compared with the same job undisturbed: bits of weights, and every sample."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.chaos.fault_plan import JobPlan

_TIMES = ("elapsed", "evaluation_seconds")
Steps = dict[int, list[tuple[int, int]]]


@dataclass(frozen=True)
class Verdict:
    """`different`: files of the last checkpoint that differ in some bit; `wrong_samples`: samples of the final
    trajectory that are skipped or repeated; `different_metrics`: whether a validation gave other figures."""

    different: list[str]
    wrong_samples: int
    different_metrics: bool
    skipped_steps: list[int]


def compare(plan: JobPlan, run: Path, undisturbed: Path, folder: Path) -> Verdict:
    """Compare a run that is done with the undisturbed one; `folder` has the trajectories of all ranks."""
    name = f"checkpoints/step-{plan.num_steps}"
    files = sorted({path.name for side in (run, undisturbed) for path in (side / name).glob("part-*")})
    different = [file for file in files if _bytes(run / name / file) != _bytes(undisturbed / name / file)]
    if not files:
        different = [name]
    wrong = 0
    for rank in range(plan.ranks):
        ours = final_trajectory(folder / f"trajectory-{rank}.jsonl", plan.num_steps)
        theirs = final_trajectory(folder / f"trajectory-undisturbed-{rank}.jsonl", plan.num_steps)
        for step in range(1, plan.num_steps + 1):
            here, there = Counter(ours.get(step, [])), Counter(theirs.get(step, []))
            wrong += sum((here - there).values()) + sum((there - here).values())
    return Verdict(different, wrong, _validations(run) != _validations(undisturbed), _skipped(run / name))


def final_trajectory(path: Path, num_steps: int) -> Steps:
    """Return the samples of each step that the final weights rest on: those of the last life that began before it.

    Of a step that a life has made twice, because it went back to a checkpoint, the last time counts.
    """
    begun: dict[int, int] = {}
    steps: dict[int, Steps] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record: dict[str, Any] = json.loads(line)
        if "begun_with" in record:
            begun[record["life"]] = record["begun_with"]
        else:
            samples = [(event, length) for event, length in record["samples"]]
            steps.setdefault(record["life"], {})[record["step"]] = samples
    found: Steps = {}
    last = num_steps
    for life in sorted(begun, reverse=True):
        for step in range(begun[life] + 1, last + 1):
            if step in steps.get(life, {}):
                found[step] = steps[life][step]
        last = min(last, begun[life])
    return found


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _validations(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in _TIMES}
        for record in records
        if record["kind"] == "eval"
    ]


def _skipped(checkpoint: Path) -> list[int]:
    steps: list[int] = json.loads((checkpoint / "progress.json").read_text())["skipped_steps"]
    return steps
