"""Which held-out items choose the checkpoint of a run, and how results say so."""

from __future__ import annotations

from turbogr.config import Config
from turbogr.data.split import LEAVE_ONE_OUT, LEAVE_TWO_OUT, Split
from turbogr.data.store import Store
from turbogr.errors import UserError
from turbogr.runs import ChosenCheckpoint
from turbogr.simple.method_settings import fixed_settings

_ITEMS = {"valid": "validation", "test": "test"}


def selecting_part(config: Config, split: Split) -> str:
    """Return the part that is evaluated during training and chooses the best checkpoint, valid or test."""
    return config.evaluate.part or ("valid" if (split.valid >= 0).any() else "test")


def check_selection(config: Config, split: Split, store: Store) -> None:
    """Check, before anything is trained, that the part which chooses the best checkpoint holds something out.

    Raises:
        UserError: no user has an item of that part under the split; the message says what to set.
    """
    part = selecting_part(config, split)
    if (split.targets(part) >= 0).any():
        return
    other = "test" if part == "valid" else "valid"
    remedies = [f"set evaluate.part={other}"] if (split.targets(other) >= 0).any() else []
    too_short = split.rule == LEAVE_TWO_OUT or (split.rule == LEAVE_ONE_OUT and part == "test")
    remedies.append("use a log with longer histories" if too_short else f"set data.split={LEAVE_TWO_OUT}")
    default = " (the default here)" if config.evaluate.part is None else ""
    raise UserError(
        f"evaluate.part is '{part}'{default}, but the split '{split.rule}' of {store.path} has no {_ITEMS[part]} item "
        f"by which a checkpoint could be chosen; {' or '.join(remedies)}"
    )


def selected_on(config: Config, split: Split, checkpoint: ChosenCheckpoint) -> str | None:
    """Return the part and metric that chose a checkpoint, None for the last one, which was not chosen."""
    if checkpoint.which != "best" or config.method is not None:
        return None
    return f"{selecting_part(config, split)} {config.evaluate.metric}"


def describe_checkpoint(config: Config, split: Split, checkpoint: ChosenCheckpoint, part: str) -> str:
    """Say which checkpoint is measured on `part` and how it was chosen, as the end of a protocol."""
    if config.method is not None:
        settings = fixed_settings(config.method, config.options)
        listed = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        return f"{config.method} fitted on the training events{f' with {listed}' if listed else ''}"
    epoch = checkpoint.epoch
    at = f"checkpoint of step {checkpoint.step:,}" + ("" if epoch is None else f" (epoch {epoch:g})")
    if checkpoint.which != "best":
        return f"{at}, the last one"
    selecting = selecting_part(config, split)
    items = "these same held-out items" if selecting == part else f"the {_ITEMS[selecting]} items"
    return f"{at}, chosen by its {config.evaluate.metric} on {items}"
