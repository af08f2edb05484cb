"""The section `ranking` of a config: what a ranking model predicts of users and items, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turbogr.config.bounds import between, positive
from turbogr.errors import UserError


@dataclass(frozen=True)
class RankingTarget:
    """Something to be predicted: whether an `action` of the store happens (`binary`), or its number (`regression`).

    `action` unset is the task's own name. The loss is the sum of the tasks' losses times their `weight`.
    """

    action: str | None = None
    kind: Literal["binary", "regression"] = "binary"
    weight: float = 1.0


@dataclass(frozen=True)
class RankingConfig:
    """What is predicted of every event, by name in `tasks`, from the item, the user and earlier events.

    `supervision: every` trains on every event, `candidates` on the last `candidates` events of a sequence, of which
    none sees another. `inputs` are the actions that the model sees of earlier events (unset: those of the tasks).
    `user_ids` and `item_ids` say whether ids have vectors, besides those of the features. `id_dropout` replaces that
    share of the users' and items' vectors by that of an unknown one in training, so that the model learns what to do
    with new ones. `action_dim` is the width of each action's vector, `hidden` that of the MLPs (unset: model.dim).
    With `counts` the model sees how often an item and a user have occurred before, and the rate of each task's action
    among these events, also of the user with each category. What was done is seen after `delay` seconds.
    `statistics` are mean and standard deviation of each action in training, `counts_until` is when
    training ends (both unset: from the data).
    """

    tasks: dict[str, RankingTarget] = field(default_factory=dict)
    supervision: Literal["every", "candidates"] = "every"
    candidates: int = 10
    inputs: tuple[str, ...] | None = None
    user_ids: bool = True
    item_ids: bool = True
    id_dropout: float = 0.0
    action_dim: int = 8
    hidden: int | None = None
    counts: bool = False
    counts_until: int | None = None
    delay: int = 0
    statistics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def check(self) -> None:
        positive(self, "candidates", "action_dim", "hidden")
        between(self, 0.0, 1.0, "id_dropout")
        if self.id_dropout >= 1.0:
            raise UserError(f"ranking.id_dropout must be below 1, got {self.id_dropout}")
        if self.delay < 0:
            raise UserError(f"ranking.delay must not be negative, got {self.delay}; give seconds, or 0")
        if not self.tasks:
            raise UserError(
                "the task 'ranking' needs something to predict; name it, such as ranking.tasks.click.action=is_click"
            )
        for name, target in self.tasks.items():
            if not name or "/" in name:
                raise UserError(f"ranking.tasks has the name '{name}', which is part of metrics' names; leave '/' out")
            if target.weight < 0:
                raise UserError(f"ranking.tasks.{name}.weight must not be negative, got {target.weight:g}")
        if not any(target.weight > 0 for target in self.tasks.values()):
            raise UserError("all tasks of ranking.tasks have the weight 0, so nothing would be learnt; raise one")

    @property
    def actions(self) -> dict[str, str]:
        """The store's action behind every task, by the task's name."""
        return {name: target.action or name for name, target in self.tasks.items()}

    @property
    def input_actions(self) -> tuple[str, ...]:
        """The actions of earlier events that the model sees."""
        return tuple(dict.fromkeys(self.actions.values())) if self.inputs is None else self.inputs
