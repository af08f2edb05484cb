"""Which faults meet which job, and when: a function of the seed, of the job's number and of the kinds still wanted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {
    "kill": "SIGKILL to one rank or to all",
    "stop": "SIGTERM to one rank or to all",
    "disk": "the disk of the run is full until the job has ended",
    "link": "the link between the ranks is slow for a while",
    "nan": "the loss or a gradient of one rank is not finite",
}
"""The kinds of faults."""

ENDING = ("kill", "stop", "disk")
"""Those that end a life; after the others it goes on."""

BAD_VALUES = ("loss", "dense", "rows")
"""Where a bad value is: in the loss, or in the gradient alone of a dense parameter or of a table's rows."""

_FAULTS_PER_JOB = 6
_LONGEST_START_SECONDS = 2.0
_LONGEST_DELAY_SECONDS = 0.08


@dataclass(frozen=True)
class Fault:
    """A fault of a kind that strikes `delay` seconds after the job has done `after_step` steps.

    `at_start`: as many seconds after the start of a life instead, if it is the first one of that life. `in_save`: as
    soon as a checkpoint is being written after that. `ranks` are those it meets. A link has `megabits` Mbit/s for
    `seconds`. A bad value is in step `after_step`, counted from 1, and `where` says in what.
    """

    kind: str
    after_step: int
    delay: float = 0.0
    at_start: bool = False
    in_save: bool = False
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    megabits: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class JobPlan:
    """A job of `ranks` processes that trains for `num_steps` steps with `settings`, and the `faults` that meet it."""

    number: int
    ranks: int
    num_steps: int
    settings: Mapping[str, Any]
    faults: tuple[Fault, ...]

    @property
    def bad_steps(self) -> list[int]:
        """Steps, counted from 1, with a value that is not finite."""
        return sorted(fault.after_step for fault in self.faults if fault.kind == "nan")


def plan_job(seed: int, number: int, wanted: Mapping[str, int], *, ranks: Sequence[int], num_steps: int) -> JobPlan:
    """Plan a job with some of the faults that are `wanted`, a count per kind."""
    draw = random.Random(f"{seed} {number}")
    size = draw.choice(list(ranks))
    pool = [kind for kind, count in wanted.items() for _ in range(count)]
    kinds = draw.sample(pool, min(_FAULTS_PER_JOB, len(pool)))
    if all(kind not in ENDING for kind in kinds) and (ending := [kind for kind in pool if kind in ENDING]):
        kinds[-1] = draw.choice(ending)
    bad_steps = iter(draw.sample(range(2, num_steps), kinds.count("nan")))
    faults = [_fault(draw, kind, size, num_steps, bad_steps) for kind in kinds]
    return JobPlan(
        number=number,
        ranks=size,
        num_steps=num_steps,
        settings=_settings(draw, size, num_steps, seed + number),
        faults=tuple(sorted(faults, key=lambda fault: fault.after_step)),
    )


def _fault(draw: random.Random, kind: str, size: int, num_steps: int, bad_steps: Iterator[int]) -> Fault:
    if kind == "nan":
        return Fault(kind, next(bad_steps), ranks=(draw.randrange(size),), where=draw.choice(BAD_VALUES))
    at_start = kind in ENDING and draw.random() < 0.2
    delay = draw.uniform(0.0, _LONGEST_START_SECONDS if at_start else _LONGEST_DELAY_SECONDS)
    after = draw.randrange(num_steps)
    if kind == "link":
        seconds, megabits = draw.uniform(0.2, 1.5), 10 ** draw.uniform(-0.3, 1.3)
        return Fault(kind, after, delay, seconds=round(seconds, 3), megabits=round(megabits, 2))
    everyone = draw.random() < 0.3
    in_save = not at_start and draw.random() < 0.25
    ranks = tuple(range(size)) if everyone else (draw.randrange(size),)
    return Fault(kind, after, round(delay, 4), at_start, in_save, () if kind == "disk" else ranks)


def _settings(draw: random.Random, size: int, num_steps: int, seed: int) -> dict[str, Any]:
    """Settings of the recipe: small, but with all that a checkpoint may have to hold."""
    # Only where there are several groups can those that remain keep the state of the last step.
    groups = draw.choice([1, *(count for count in range(2, size + 1) if size % count == 0 for _ in range(2))])
    mode = draw.choice(["sync", "semi_async", "exact_overlap"])
    return {
        "model.dim": 16,
        "model.max_len": 16,
        "model.dropout": 0.1,
        "loss.num_negatives": 8,
        "optimizer.warmup_steps": 2,
        "optimizer.table": draw.choice(["adam", "adagrad"]),
        "data.batch_size": 16,
        "evaluate.every": 1,
        "evaluate.patience": "",
        "evaluate.baselines": "[]",
        "train.epochs": "",
        "train.steps": num_steps,
        "train.seed": seed % 2**31,
        "train.threads": 1,
        "train.log_every": 5,
        "train.checkpoint_every": draw.randint(3, 9),
        "train.background_save": draw.random() < 0.7,
        "train.on_bad_step": draw.choice(["skip", "rewind"]),
        "train.max_bad_steps_in_a_row": 50,
        "train.copy_data": "never",
        "train.tensorboard": False,
        "train.profile": False,
        "parallel.groups": groups,
        "parallel.members": size // groups,
        "parallel.balance": draw.choice(["none", "reallocate"]),
        "parallel.cost": "[1.0, 0.01]",
        "parallel.check_every": 5,
        "parallel.timeout": 30,
        "pipeline.mode": mode,
    }


def count_kinds(faults: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Count faults that have struck, by kind."""
    return Counter(str(fault["kind"]) for fault in faults)
