"""How far a run has come: everything but tensors that is needed to resume it exactly."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from turbogr.checksums import is_sealed, sealed, unsealed
from turbogr.errors import UserError

VERSION = 2
"""Of progress.json. A release that adds or changes what a resumed run depends on raises it."""


class NewerCheckpoint(UserError):
    """A checkpoint of a later release, which this one cannot resume."""


@dataclass
class Window:
    """Sums since the last training record, so that an interruption does not change a record; `grad_norm`, of summed
    gradients or not, and `lr` are of the last step, `staleness` is the largest.

    Of the `seconds`, the main thread waited for rows or their gradients on the network (`exposed_sparse`), for other
    ranks (`exposed_dense`) and for batches (`idle`). The loss is a mean over `trained` targets, which are all tokens
    unless repeats are skipped. Of `rows_read` rows, `rows_shared` were in the batch before too.
    """

    steps: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    trained: int = 0
    sequences: int = 0
    strict_flops: float = 0.0
    nominal_flops: float = 0.0
    seconds: float = 0.0
    grad_norm: float = 0.0
    grad_norm_summed: bool = True
    lr: float = 0.0
    exposed_sparse: float = 0.0
    exposed_dense: float = 0.0
    idle: float = 0.0
    staleness: int = 0
    rows_read: int = 0
    rows_shared: int = 0


@dataclass
class Progress:
    """Counts since the start of the run; `seconds` are those of training steps, `wall_seconds` all; `loader` is the
    position of the next batch.

    `skipped_steps`, counted from 1, are those whose update was left out because a value was not finite.

    `best_value` and `best_step` are of the selecting metric, named by `selected_by`; `evaluated_step` is the step of
    the last evaluation and `stale_evaluations` how many came since the best. `metrics_bytes` is how long metrics.jsonl
    is at this point. `earlier_tables` is how many earlier states of the item table the checkpoint has, for batches that
    were in flight.
    """

    step: int = 0
    epochs: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    strict_flops: float = 0.0
    nominal_flops: float = 0.0
    loader: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "step": 0})
    skipped_steps: list[int] = field(default_factory=list)
    evaluated_step: int | None = None
    selected_by: str | None = None
    best_value: float | None = None
    best_step: int | None = None
    best_epoch: float | None = None
    stale_evaluations: int = 0
    metrics_bytes: int = 0
    earlier_tables: int = 0
    window: Window = field(default_factory=Window)

    def to_json(self) -> str:
        """Return the text of progress.json, with its checksum."""
        return sealed({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Progress:
        """Read what `to_json` wrote, of this release or an earlier one; `where` names the file in the error.

        Raises:
            NewerCheckpoint: a later release wrote it.
            UserError: it is damaged.
        """
        try:
            text = text.encode() if isinstance(text, str) else text
            raw: dict[str, Any] = unsealed(text, "progress.json") if is_sealed(text) else json.loads(text)
            version = raw.pop("version", 0)  # earlier releases did not write it
            if version == VERSION and not is_sealed(text):
                raise ValueError("progress.json has no checksum")
            if version > VERSION:
                raise NewerCheckpoint(
                    f"{where} was written by a later release of turbogr (progress.json has version {version}, and this "
                    f"release reads up to {VERSION}); update turbogr, or start a new run in another --out"
                )
            window = {"trained": raw["window"]["tokens"], **raw["window"]}  # earlier releases trained on all tokens
            return cls(**{**raw, "window": Window(**window)})
        except NewerCheckpoint:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # Damaged is a ValueError
            raise UserError(
                f"{where} is damaged ({error}); remove its folder to fall back to an earlier one"
            ) from error
