"""Measure in a process of its own: one that fails, or that the system kills, is named in a sentence."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

from turbogr.errors import UserError

_SHOWN_CHARACTERS = 1000

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class MeasurementFailed(UserError):
    """A process that measures one case of a benchmark failed. Other cases can still be measured."""


def in_child(
    function: Callable[[_Argument], _Result], argument: _Argument, method: Literal["spawn", "forkserver"] = "spawn"
) -> _Result:
    """Return function(argument) of a new process, which ends with an interruption of this one.

    With `forkserver` the process is forked from one that has imported the function's module and done nothing else.

    Raises:
        MeasurementFailed: it raised, or was killed.
    """
    context = get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([function.__module__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, argument), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        done, result = ours.recv()
    except EOFError:
        process.join()
        raise failure("", process.exitcode) from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if not done:
        raise MeasurementFailed(result)
    found: _Result = result
    return found


def _answer(pipe: Connection, function: Callable[[Any], Any], argument: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C; this process is killed then, without a traceback
    try:
        answer: tuple[bool, Any] = True, function(argument)
    except Exception as error:
        answer = False, f"{type(error).__name__}: {error}"
    with suppress(BrokenPipeError):
        pipe.send(answer)


def failure(printed: str, status: int | None) -> MeasurementFailed:
    """Return the error of a measuring process that printed this on stderr and ended with this exit status."""
    if status == -signal.SIGKILL:
        return MeasurementFailed("the measuring process was killed, as the system does when memory runs out")
    error = MeasurementFailed(f"the measuring process ended with {status}: {last_words(printed)}")
    error.__cause__ = RuntimeError(printed)  # TURBOGR_TRACEBACK=1 shows it
    return error


def last_words(printed: str) -> str:
    """Return the line of a failed process's output that says why: the last that names an error, else the last."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Lost|Interrupt)\b|terminate called", line)
    ]
    return [*(lines or ["no output"]), *errors][-1][:_SHOWN_CHARACTERS]
