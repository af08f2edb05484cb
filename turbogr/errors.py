"""The one exception for mistakes that a user can mend, and the one warning that is none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the user's input; the message names the value, the place and the remedy.

    The command line prints the message alone and exits with status 2; anything else that is raised is our bug
    and keeps its traceback. `stage` is that of a training step in which it was met, once the message names it.
    """

    stage: str | None = None


class ToldElsewhere(UserError):
    """A failure that another rank tells; the command line of this one says nothing."""


class RankLost(UserError):
    """Another rank died or does not answer; the run goes on from its last checkpoint when it is started again."""


class Note(UserWarning):
    """Something worth knowing about what was done, with nothing to mend; the command line calls it a note."""


def excerpt(text: str, longest: int = 60) -> str:
    """Return `text` in quotes and with escapes for a message, cut where it is long."""
    if len(text) <= longest:
        return repr(text)
    return f"{text[: longest // 2]!r}... of {len(text):,} characters"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" when none is close."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
