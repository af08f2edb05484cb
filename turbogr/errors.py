"""`UserError`: the user can fix it. `Note`: information, nothing to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the user's input; the message names the value, where it was given, and the remedy.

    The command line prints only the message and exits with status 2. Any other exception is a bug of TurboGR and keeps
    its traceback. `stage`: the stage of the training step that raised it, once the message names that stage.
    """

    stage: str | None = None


class ReportedByOtherRank(UserError):
    """A failure that another rank reports; this rank's command line prints nothing."""


class RankLost(UserError):
    """Another rank has ended or does not answer. Starting the run again continues from its last checkpoint."""


class Note(UserWarning):
    """Information about what was done, with nothing to do; the command line prints it as a note."""


def excerpt(text: str, longest: int = 60) -> str:
    """Return `text` quoted and escaped for a message, shortened if it is longer than `longest` characters."""

    if len(text) <= longest:
        return repr(text)
    return f"{text[: longest // 2]!r}... of {len(text):,} characters"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" when none is close."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
