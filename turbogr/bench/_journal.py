"""What a benchmark has measured so far, kept on disk: after an interruption the same command goes on where it stopped.

A benchmark asks for each of its cases through `measured`. The journal is a file beside the record, FILE.partial.json
for `--json FILE.json`. It belongs to one benchmark with its settings, machine, versions and code: figures of others
must not be mixed. It is removed when the record is written and no case is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turbogr.bench._children import MeasurementFailed
from turbogr.errors import UserError
from turbogr.files import replace_text


class CaseFailed(UserError):
    """A case of a benchmark could not be measured; the message names it. The other cases are kept."""


class Journal:
    """The measured cases of a benchmark by name, in the file `path` (None: only in memory).

    `identity`: what the cases belong to: JSON values by name.

    Raises:
        UserError: the file belongs to something else, or is not a journal.
    """

    def __init__(self, path: Path | None = None, identity: Mapping[str, Any] | None = None) -> None:
        self.path, self._identity = path, json.loads(json.dumps(dict(identity or {})))
        self._cases: dict[str, Any] = {}
        self.prefix = ""
        """Put before the names of cases: a benchmark that runs others has theirs more than once."""
        self._asked: set[str] = set()
        self.failed: list[str] = []
        if path is not None and path.exists():
            self._cases = self._read(path)
        self.num_resumed = len(self._cases)

    @property
    def num_kept(self) -> int:
        """How many cases are measured."""
        return len(self._cases)

    def measured(self, case: str, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, as JSON values (a tuple is a list); a case in the journal is not measured again.

        Raises:
            CaseFailed: `work` raised MeasurementFailed; the message names the case.
        """
        case = self.prefix + case
        assert case not in self._asked, f"two cases are called '{case}'"
        self._asked.add(case)
        if case not in self._cases:
            try:
                value = json.loads(json.dumps(work()))
            except MeasurementFailed as error:
                self.failed.append(case)
                raise CaseFailed(f"{case} could not be measured: {error}") from error
            self._cases[case] = value
            if self.path is not None:
                content = {"identity": self._identity, "cases": self._cases}
                replace_text(self.path, json.dumps(content, indent=1) + "\n")
        return self._cases[case]

    def close(self) -> None:
        """Remove the file if no case is missing: the record has everything."""
        if self.path is not None and not self.failed:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            theirs, cases = dict(content["identity"]), dict(content["cases"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is not a journal of a benchmark ({error}); remove it or name another --json"
            ) from None
        if theirs != self._identity:
            differing = [key for key in {**theirs, **self._identity} if theirs.get(key) != self._identity.get(key)]
            what = differing[0]
            raise UserError(
                f"{path} has {len(cases)} cases of an interrupted benchmark with another {what} ({theirs.get(what)}, "
                f"not {self._identity.get(what)}); go on with that, remove the file to measure all again, or name "
                "another --json"
            )
        return cases


_current: Journal | None = None


@contextmanager
def using(journal: Journal) -> Iterator[None]:
    """Let `measured` use this journal inside the block."""
    global _current
    before, _current = _current, journal
    try:
        yield
    finally:
        _current = before


@contextmanager
def cases_of(section: str) -> Iterator[None]:
    """Put the section before the names of cases inside the block: benchmarks that are part of it have their own."""
    if _current is None:
        yield
        return
    before, _current.prefix = _current.prefix, f"{_current.prefix}{section}: "
    try:
        yield
    finally:
        _current.prefix = before


def measured(case: str, work: Callable[[], Any]) -> Any:
    """Measure a case, or take it from the journal of this benchmark; see `Journal.measured`."""
    return (Journal() if _current is None else _current).measured(case, work)
