"""Bad steps: the loss or a gradient is not finite. What is not finite and where, and what training does about it.

All ranks leave out the update of a bad step: weights, optimiser state and the optimisers' step counts stay as they are.
The step still counts as one of the run's, so the learning rate, dropout and negatives of later steps are those of a run
without a bad step. `train.on_bad_step` says whether training stops there, goes on (skip), or first goes back to the
last checkpoint whose weights are finite (rewind), which also replaces weights that a fault has damaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.config import TrainConfig
from turbogr.data.batching import Batch
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.tables.working_set import WorkingSets, gradient_of
from turbogr.training.step import Measured, Stepper

_NAMES_SHOWN, _USERS_SHOWN = 3, 5


class NonFiniteError(UserError):
    """The loss or a gradient is not finite, and training ends; raised before any weight is touched."""


class RewindNeeded(Exception):
    """Training is to go back to the last good checkpoint because of `bad`."""

    def __init__(self, bad: BadStep) -> None:
        super().__init__(str(bad))
        self.bad = bad


class _OwnFindings(NamedTuple):
    """What is not finite when a rank computes its part of a step again, and the users of that part."""

    what: str
    users: str


@dataclass(frozen=True)
class BadStep:
    """The step (counted from 1), what was not finite, on which ranks (none: nothing when computed again), and users."""

    step: int
    what: str
    ranks: tuple[int, ...]
    num_ranks: int
    users: str

    def __str__(self) -> str:
        where = ""
        if self.num_ranks > 1 and self.ranks:
            where = f" on rank{'s' * (len(self.ranks) > 1)} {_listed(self.ranks, 8)}"
        return f"{self.what}{where} is not finite at step {self.step}"

    @property
    def details(self) -> str:
        """What to know besides, as the end of a sentence that begins with the text of this object."""
        if self.ranks:
            return f"users of the batch: {self.users}"
        return "computed again all values are finite, which points to faulty memory or a faulty processor"

    def to_record(self, action: str) -> dict[str, Any]:
        """Return the line of metrics.jsonl."""
        return {"action": action, "what": self.what, "ranks": list(self.ranks), "users": self.users}


def is_bad(measured: Measured) -> bool:
    """Whether the loss or the norm of the gradients is not finite; the same on all ranks."""
    return not (math.isfinite(measured.loss) and math.isfinite(measured.grad_norm))


def examine(stepper: Stepper, store: Store, batch: Batch, sets: WorkingSets, step: int, measured: Measured) -> BadStep:
    """Compute a bad step (from 0) again and name what is not finite on which ranks; all ranks call it together.

    The sums over the ranks no longer tell whose part was not finite, so every rank computes its own part again, alone.
    The gradients are dropped.
    """
    world = stepper.mesh.world
    reports = world.gather_objects(_OwnFindings(_find(stepper, batch, sets, step), _users_of(store, batch)))
    ranks = tuple(rank for rank, report in enumerate(reports) if report.what)
    named = reports[ranks[0] if ranks else 0]
    what = named.what or ("a gradient" if math.isfinite(measured.loss) else "the loss")
    return BadStep(step + 1, what, ranks, world.size, named.users)


def _find(stepper: Stepper, batch: Batch, sets: WorkingSets, step: int) -> str:
    """Compute this rank's part of a step again; return what is not finite, "" for nothing."""
    stepper.drop_gradients()
    if not batch.num_tokens:
        return ""
    again = sets.without_hooks()
    loss = stepper.loss(batch, again, step)
    if not math.isfinite(float(loss.detach())):
        return "the loss"
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: parameter.grad for name, parameter in stepper.model.named_parameters() if parameter.grad is not None}
    titles = [group.title for group in stepper.tables.groups]
    rows = [gradient_of(group.rows) for group in again.groups]
    grads |= {f"rows of the table {title}": grad for title, grad in zip(titles, rows, strict=True)}
    stepper.drop_gradients()
    found = [name for name, grad in grads.items() if not grad.isfinite().all()]
    if found:
        return f"the gradient of {_listed(found, _NAMES_SHOWN)}"
    return "" if _norm_is_finite(list(grads.values())) else "the norm of the gradients"


def _norm_is_finite(grads: Sequence[Tensor]) -> bool:
    return all(bool(torch.linalg.vector_norm(grad).isfinite()) for grad in grads)


def _users_of(store: Store, batch: Batch) -> str:
    users = batch.users.cpu().numpy()
    shown = ", ".join(str(user) for user in store.user_ids.decode(users[:_USERS_SHOWN]))
    return f"{shown} and {len(users) - _USERS_SHOWN} more" if len(users) > _USERS_SHOWN else shown


def _listed(names: Sequence[object], most: int) -> str:
    shown = ", ".join(str(name) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def decide(bad: BadStep, config: TrainConfig, skipped: Sequence[int]) -> None:
    """Return if the update of `bad` is to be left out and training goes on; `skipped` are the steps left out so far.

    Raises:
        NonFiniteError: training stops here.
        RewindNeeded: training goes back first.
    """
    limit = _limit_reached(bad.step, config, skipped)
    if config.on_bad_step == "rewind" and limit is None:
        raise RewindNeeded(bad)
    if config.on_bad_step == "skip" and limit is None:
        return
    remedy = (
        "Try a lower optimizer.lr, optimizer.clip_norm=1, or warm-up, and continue with --resume; "
        "train.on_bad_step=skip leaves such a step out"
    )
    if limit is not None:
        remedy = (
            f"{limit}. Try a lower optimizer.lr, optimizer.clip_norm=1, or a higher limit, and continue with --resume"
        )
    raise NonFiniteError(
        f"{bad}; {bad.details}. No weight was changed, and a checkpoint of step {bad.step - 1} is kept. {remedy}"
    )


def _limit_reached(step: int, config: TrainConfig, skipped: Sequence[int]) -> str | None:
    """Return which limit one more bad step would exceed, as a sentence, None for none."""
    if config.on_bad_step == "stop":
        return None
    if len(skipped) >= config.max_bad_steps:
        return f"{len(skipped)} steps have been left out already, and train.max_bad_steps is {config.max_bad_steps}"
    in_a_row = 0
    while step - 1 - in_a_row in skipped:
        in_a_row += 1
    if in_a_row >= config.max_bad_steps_in_a_row:
        limit = config.max_bad_steps_in_a_row
        return f"The {in_a_row} steps before it were left out too, and train.max_bad_steps_in_a_row is {limit}"
    return None


def describe_skipped(skipped: Sequence[int]) -> str:
    """Return a sentence about the steps that a run has left out."""
    steps, were = ("steps", "were") if len(skipped) > 1 else ("step", "was")
    return (
        f"{len(skipped)} {steps} {were} left out because the loss or a gradient was not finite: "
        f"{steps} {_listed(skipped, 10)} (metrics.jsonl says what)"
    )
