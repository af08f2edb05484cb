"""The command line: find the command, run it, and turn a failure into one sentence and an exit status.

Only the module of the chosen command is imported, so `turbogr --help` does not wait for torch. Exit statuses: 0 done,
1 a negative result of the command (`conformance`: not the same), 2 an error that the user can fix, printed without a
traceback, 130 Ctrl-C, 141 the reader of our output closed the pipe, 143 SIGTERM. Any other exception is a bug of
TurboGR and keeps its traceback; TURBOGR_TRACEBACK=1 shows the traceback of every error.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from turbogr import __version__
from turbogr.errors import Note, RankLost, ReportedByOtherRank, UserError, one_line
from turbogr.option_hints import command_hint, option_hint, positional_hint
from turbogr.option_names import command_line

COMMANDS = {
    "prepare": "turn an interaction log into a prepared store",
    "item-info": "add titles and other columns about the items to a prepared store",
    "inspect": "show what a prepared store contains",
    "train": "train a model on a prepared store",
    "recipes": "list the recipes; print or copy one",
    "tune": "search for better settings on a prepared store",
    "sweep": "train recipes over a grid of settings and compare the runs",
    "evaluate": "measure a trained run on its held-out items",
    "recommend": "write the recommendations of a trained run",
    "export": "write a trained run as a folder that works without TurboGR",
    "serve": "answer requests for recommendations over HTTP",
    "report": "write a run as one self-contained HTML page",
    "conformance": "compare a model with a golden file, or write one",
    "bench": "run a benchmark; without a name, list them",
    "chaos": "meet training jobs with random faults and compare what is left",
    "doctor": "show what this machine is and what is worth fixing",
}

_OS_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another folder",
    errno.EFBIG: "the file would be larger than the file system or this process's limit (ulimit -f) allows",
    errno.EACCES: "permission denied; change the permissions or choose another path",
    errno.EPERM: "permission denied; change the permissions or choose another path",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.ENOENT: "no such file or folder; check the path",
    errno.ENOTDIR: "a part of the path is a file, not a folder; check the path",
    errno.EISDIR: "this is a folder, not a file; check the path",
    errno.EMFILE: "too many open files; raise the limit with ulimit -n",
    errno.ELOOP: "a symbolic link leads to itself; remove it or choose another path",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
}


_NO_MEMORY = re.compile(r"can't allocate memory|[Cc]annot allocate memory|out of memory|std::bad_alloc")
_REPORT_SECONDS = 3.0  # the launcher stops all ranks when one ends; the rank that reports the error needs time for it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `turbogr` with the arguments of a command line and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with command_line(), _own_warnings_in_one_line(), _Stopping() as stopping:
        try:
            status = _run(arguments, stopping)
            sys.stdout.flush()
            return status
        except ReportedByOtherRank:
            _let_signals_end_us()
            time.sleep(_REPORT_SECONDS)
            return 2
        except RankLost as error:
            _let_signals_end_us()
            return _fail(str(error), 2)
        except UserError as error:
            return _fail(str(error), 2)
        except KeyboardInterrupt:
            return _end_rank(_fail("interrupted", 130, label=""))
        except _Terminated:
            return _end_rank(_fail("terminated", 143, label=""))
        except BrokenPipeError:
            _silence_stdout()
            return 141
        except Exception as error:
            sentence = _explain(error)
            if sentence is None:
                raise
            return _fail(sentence, 2)


def _run(arguments: list[str], stopping: _Stopping) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    chosen = arguments[0] if arguments else None
    if chosen is None:
        _build_parser(None).print_help()
        return 0
    if chosen.startswith("-") and chosen not in _build_parser(None).option_names():
        raise UserError(_unknown_option(chosen, "", _build_parser(None)))
    if not chosen.startswith("-") and chosen not in COMMANDS:
        raise UserError(
            f"unknown command '{chosen}'.{command_hint(chosen, COMMANDS)} Commands: {', '.join(COMMANDS)}; "
            "see turbogr --help"
        )
    parser = _build_parser(chosen)
    _refuse_unknown_options(arguments[1:], parser.subcommand(chosen))
    try:
        args, unknown = parser.parse_known_args(arguments)
    except SystemExit as stop:  # --help and --version leave this way
        return int(stop.code or 0)
    if unknown:
        raise UserError(f"unexpected argument '{unknown[0]}'; see {parser.subcommand(chosen).prog} --help")
    stopping.raise_postponed()
    return int(args.run(args))


class _Parser(argparse.ArgumentParser):
    """argparse that raises UserError, and without abbreviated options, which break when options are added.

    Its sub-parsers are of the same class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def subcommand(self, name: str) -> _Parser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                found: _Parser = action.choices[name]
                return found
        return self

    def option_names(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def positional_names(self) -> list[str]:
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def takes_settings(self) -> bool:
        """Whether it has `--set section.key=value` for the settings of a recipe."""
        return any(action.dest == "overrides" for action in self._actions)


def _build_parser(chosen: str | None) -> _Parser:
    """Build the parser: the chosen command with its options, the others by name only."""
    parser = _Parser(prog="turbogr", description="Train generative recommenders on interaction logs.")
    parser.add_argument("--version", action="version", version=f"turbogr {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == chosen:
            importlib.import_module(f"turbogr.commands.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary, add_help=False)
    parser.epilog = "turbogr COMMAND --help shows the options of a command."
    return parser


def _refuse_unknown_options(arguments: list[str], parser: _Parser) -> None:
    """Raise UserError for the first unknown option.

    argparse would first complain of required options that are missing, which hides that one of them is misspelt.
    """
    known = parser.option_names()
    for place, argument in enumerate(arguments):
        if argument == "--":
            return
        name, equals, value = argument.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w-]*", name) and name not in known and not _is_short(name, known):
            following = arguments[place + 1 : place + 2]
            given = value if equals else "".join(text for text in following if not text.startswith("-"))
            source = arguments[0] if "source" in parser.positional_names() and not arguments[0].startswith("-") else ""
            raise UserError(_unknown_option(name, given, parser, f"{parser.prog} {source}".rstrip()))


def _is_short(name: str, known: list[str]) -> bool:
    """Whether argparse reads `-k10` as the known option `-k` with a value."""
    return not name.startswith("--") and name[:2] in known


def _unknown_option(name: str, value: str, parser: _Parser, prog: str | None = None) -> str:
    """Return the message; `prog` is the command whose help has the options, if it is not the parser's."""

    def settings(option: str) -> list[str]:
        from turbogr.config import meant_settings

        return meant_settings(option)

    hint = positional_hint(name, parser.positional_names()) or option_hint(
        name, value, parser.option_names(), settings if parser.takes_settings() else None, _commands_with
    )
    return f"unknown option '{name}'.{hint} See {prog or parser.prog} --help"


def _commands_with(option: str) -> list[str]:
    """Return the commands that have an option of exactly this name."""
    return [name for name in COMMANDS if option in _build_parser(name).subcommand(name).option_names()]


def _explain(error: BaseException) -> str | None:
    """Return a sentence for an error of the file system or of memory, anywhere in the chain of causes, or None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or _NO_MEMORY.search(str(seen)):
            return _about_memory(str(seen))
        if isinstance(seen, OSError):
            remedy = _OS_REMEDIES.get(seen.errno or 0)
            if remedy is not None:
                names = [os.fsdecode(name) for name in (seen.filename, seen.filename2) if isinstance(name, str | bytes)]
                return f"{names[-1]}: {remedy}" if names else remedy
            if os.strerror(errno.ENOSPC) in str(seen):  # some libraries drop the error number and keep the text
                return _OS_REMEDIES[errno.ENOSPC]
        seen = seen.__cause__ or seen.__context__
    return None


def _about_memory(message: str) -> str:
    asked = re.search(r"allocate (\d+) bytes", message)
    size = f" (it asked for {int(asked[1]) / 1e9:,.1f} GB at once)" if asked else ""
    return (
        f"there is not enough memory{size}; a smaller data.batch_size, model.max_len, model.dim or loss.num_negatives "
        "needs less, and so does a smaller --batch-size of evaluate and recommend"
    )


def _fail(sentence: str, status: int, label: str = "error: ") -> int:
    """Print the sentence as one line on stderr, after the traceback if TURBOGR_TRACEBACK is set; return `status`."""
    sys.stdout.flush()
    if os.environ.get("TURBOGR_TRACEBACK"):
        traceback.print_exc()
    print(f"turbogr: {label}{one_line(sentence)}", file=sys.stderr, flush=True)
    return status


def _end_rank(status: int) -> int:
    """End the process, if it is one of several ranks, without Python's own end; else return the status.

    PyTorch's threads may wait for ranks that are gone, and Python's end for these threads.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(status)
    return status


def _let_signals_end_us() -> None:
    """From here on a signal ends this rank without output: the error is reported, here or by another rank."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminated(BaseException):
    """SIGTERM as an exception, so that partly written files are removed before the process ends."""


class _Stopping:
    """Inside `with`, SIGINT raises KeyboardInterrupt and SIGTERM raises _Terminated, but not inside an import.

    Libraries guard their optional imports with a bare `except`, which would swallow the exception, and the command
    would continue. So a signal that arrives during an import is sent again when the import is over, to the handler that
    is installed by then; a second signal is raised at once. A signal that the caller ignores stays ignored. Outside the
    main thread, where Python cannot set handlers, nothing is changed.
    """

    _INTERVAL = 0.05

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._postponed: int | None = None

    def __enter__(self) -> _Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        self._cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def raise_postponed(self) -> None:
        """Send a postponed signal again now; called between the imports and the command."""
        if self._postponed is not None:
            number = self._postponed
            self._cancel()
            signal.raise_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._postponed is None and _is_importing(frame):
            self._postponed = number
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._look_again)
            signal.setitimer(signal.ITIMER_REAL, self._INTERVAL, self._INTERVAL)
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        raise _Terminated

    def _look_again(self, number: int, frame: FrameType | None) -> None:
        if not _is_importing(frame):
            self.raise_postponed()

    def _cancel(self) -> None:
        if self._postponed is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._postponed = None


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported in this frame or in a caller of it, up to `main`."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def _own_warnings_in_one_line() -> Iterator[None]:
    """Print warnings of this package as one sentence; warnings of libraries keep their form."""
    package = str(Path(__file__).parent)
    inherited = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename.startswith(package):
            label = "note" if issubclass(category, Note) else "warning"
            print(f"turbogr: {label}: {one_line(str(message))}", file=file or sys.stderr, flush=True)
        else:
            inherited(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = inherited
