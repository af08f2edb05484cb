"""`UserError`: the user can fix it. `Note`: information, nothing to do."""

from __future__ import annotations

import difflib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence

from turbogr.option_names import in_terms_of_caller

_MOST_SUGGESTED = 3
_VERY_SIMILAR = 0.7


class UserError(ValueError):
    """A mistake in the user's input; the message names the value, where it was given, and the remedy.

    The command line prints only the message and exits with status 2. Any other exception is a bug of TurboGR and keeps
    its traceback. Options are called as on the command line where a message is written, and as the caller knows them
    where it is read: `--out` or `out=`. `stage`: the stage of the training step that raised it, once the message names
    that stage.
    """

    stage: str | None = None

    def __str__(self) -> str:
        return in_terms_of_caller(super().__str__())


class ReportedByOtherRank(UserError):
    """A failure that another rank reports; this rank's command line prints nothing."""


class RankLost(UserError):
    """Another rank has ended or does not answer. Starting the run again continues from its last checkpoint."""


class Note(UserWarning):
    """Information about what was done, with nothing to do; the command line prints it as a note."""

    def __str__(self) -> str:
        return in_terms_of_caller(super().__str__())


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that called this package, or of our command that did."""
    package = os.path.dirname(__file__)
    frame, level = sys._getframe(1).f_back, 3
    while frame is not None and frame.f_code.co_filename.startswith(package):
        if f"{os.sep}commands{os.sep}" in frame.f_code.co_filename:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def one_line(text: str) -> str:
    """Return a message as one line that a terminal shows as it is: what would control the terminal is escaped.

    Names of files, ids and titles may come from somebody else.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))


def excerpt(text: str, longest: int = 60) -> str:
    """Return `text` quoted and escaped for a message, shortened if it is longer than `longest` characters."""

    if len(text) <= longest:
        return repr(text)
    return f"{text[: longest // 2]!r}... of {len(text):,} characters"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known names that `name` is most likely meant to be, or "" if none is."""
    found = nearest_names(str(name), [str(k) for k in known])
    return f" Did you mean {' or '.join(repr(each) for each in found)}?" if found else ""


def nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three known names that `name` may be meant to be, likeliest first; none rather than a wild guess.

    Those that differ in a few letters only, else those whose words begin like the words of `name` or the other way
    round: `--min-events` may be `--min-user-events`, and `--output` may be `--out`. Upper and lower case, - and _ are
    the same.
    """
    words = _words(name)
    text = "".join(words)
    if not text:
        return []
    distances = {other: _edit_distance(text, "".join(_words(other))) for other in dict.fromkeys(known)}
    close = min(distances.values(), default=len(text))
    if close <= _most_typos(text):
        return [other for other, distance in distances.items() if distance == close][:_MOST_SUGGESTED]
    alike = [other for other in distances if _begin_alike(words, _words(other))]
    alike.sort(key=lambda other: (not _begin_alike(words[:1], _words(other)[:1]), distances[other]))
    return alike[:_MOST_SUGGESTED] or _similar(text, distances)


def _similar(text: str, known: Iterable[str]) -> list[str]:
    """Return the most similar of the known names that begin with the same letter, if it is very similar."""
    plain = {"".join(_words(other)): other for other in known}
    found = difflib.get_close_matches(text, [other for other in plain if other[:1] == text[:1]], 1, _VERY_SIMILAR)
    return [plain[other] for other in found]


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _most_typos(text: str) -> int:
    return 0 if len(text) < 3 else (len(text) + 1) // 4


def _begin_alike(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether all words of one name begin, or are begun by, words of the other; one of three letters at least."""
    fewer, more = sorted((words, others), key=len)

    def pair(word: str) -> str | None:
        return next((other for other in more if other.startswith(word) or word.startswith(other)), None)

    shared = [min(len(word), len(pair(word) or "")) for word in fewer]
    return bool(shared) and min(shared) > 0 and max(shared) >= 3


def _edit_distance(one: str, two: str) -> int:
    """Number of letters to insert, drop, replace or swap with their neighbour to make `two` of `one`."""
    rows = [list(range(len(two) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, other in enumerate(two, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, other) == (two[j - 2], one[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
