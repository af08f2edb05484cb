"""Predicts the paper's scalability column from its device: two constants for all ten presets.

A step of table 1 takes batch · 32 ÷ (samples/s) seconds: its throughput and MFU columns together say that it had 32
devices of 376 TFLOP/s. Of these, `per_sequence` · batch ^ `power` seconds are visible communication, and scalability is
the share of the step that is not. Nothing of the scalability column but the two constants is used. Communication in
proportion to tokens, of which computing hides a part, fits worse (8.7 % with three constants): `long` has the tokens of
`large` and half of its communication. The power above 1 is what the column shows; the paper gives no reason for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from turbogr.bench._paper_models import PAPER_CASES
from turbogr.bench._paper_rows import BATCH_SIZES, Part, Row
from turbogr.bench._paper_steps import SAMPLES, SCALABILITY
from turbogr.bench.record import Cell, Table

_DEVICES = 32


class Device(NamedTuple):
    """The constants: milliseconds of visible communication with one sequence, and how they grow with sequences."""

    per_sequence: float
    power: float


class Step(NamedTuple):
    """A step of one preset on one of the paper's devices: its seconds, and its sequences."""

    seconds: float
    sequences: int


def paper_steps() -> dict[str, Step]:
    """The steps of table 1 by preset."""
    steps = {}
    for name in PAPER_CASES:
        size = name.partition("_")[2]
        batch = BATCH_SIZES[size]
        steps[name] = Step(batch * _DEVICES / SAMPLES[name], batch)
    return steps


def scalability(step: Step, device: Device) -> float:
    """Return the predicted scalability."""
    seen = 1e-3 * device.per_sequence * step.sequences**device.power
    return float(1 - min(0.95, seen / step.seconds))


def fit(names: Sequence[str], steps: Mapping[str, Step]) -> Device:
    """Fit the constants to the scalability of these presets, by the mean absolute relative error."""

    def error(constants: Any) -> float:
        device = Device(abs(constants[0]), constants[1])
        return float(np.mean([abs(scalability(steps[name], device) / SCALABILITY[name] - 1) for name in names]))

    starts = [(per_sequence, power) for per_sequence in (1.0, 3.0) for power in (1.0, 1.5)]
    options = {"xatol": 1e-7, "fatol": 1e-10, "maxiter": 4000}
    found = min(
        (minimize(error, start, method="Nelder-Mead", options=options) for start in starts), key=lambda f: f.fun
    )
    return Device(abs(float(found.x[0])), float(found.x[1]))


def simulator(settings: Mapping[str, Any], part: Part) -> None:
    """Fit with one preset left out at a time, and predict that one."""
    steps = paper_steps()
    rows: list[list[Cell]] = []
    errors = []
    for name in PAPER_CASES:
        predicted = scalability(steps[name], fit([other for other in PAPER_CASES if other != name], steps))
        errors.append(abs(predicted / SCALABILITY[name] - 1))
        rows.append([name, SCALABILITY[name], predicted, errors[-1]])
    everything = fit(PAPER_CASES, steps)
    columns = ["preset", "paper", "ours", "error"]
    part.tables.append(Table("Scalability predicted by the others' constants", columns, rows))
    part.notes.append(
        f"constants fitted to all presets: {everything.per_sequence:.3g} ms · sequences ^ {everything.power:.3g} of "
        "visible communication in a step. The step times of table 1 (55 ms for FuXi-large) are not those of table 6 "
        "(696 ms), so table 6 does not enter"
    )
    part.figures.update(
        {f"simulator_{name}": value for name, value in zip(Device._fields, everything, strict=True)},
        simulator_error_worst=max(errors),
    )
    part.add(
        Row("simulator_error", "Error of predicted scalability, one preset left out at a time", None,
            "the paper prints no prediction; the aim is .05", float(np.mean(errors)),
            "mean absolute relative error over ten presets, two constants, fed with the paper's throughput column",
            "lower", "simulated", ("sections=simulator",))
    )  # fmt: skip
