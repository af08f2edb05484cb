from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest

import turbogr
from turbogr import cli
from turbogr.errors import Note, UserError


@pytest.fixture
def command(monkeypatch):
    """Use a function in place of `turbogr doctor`."""

    def install(run):
        module = types.ModuleType("turbogr.commands.doctor")

        def add_parser(subparsers):
            parser = subparsers.add_parser("doctor")
            parser.add_argument("--json")
            parser.set_defaults(run=run)

        module.add_parser = add_parser
        monkeypatch.setitem(sys.modules, "turbogr.commands.doctor", module)

    return install


def raising(error):
    def run(args):
        raise error

    return run


def turbogr_process(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "turbogr", *arguments], capture_output=True, text=True, **options)


def test_without_arguments_it_prints_help(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"    {name}" in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["trian"]])
def test_help_does_not_wait_for_torch(arguments):
    code = f"import sys; from turbogr.cli import main; main({arguments!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_preparing_does_not_wait_for_torch(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,3\n1,3,4\n2,2,3\n2,3,3\n")
    arguments = ["prepare", "csv", str(tmp_path / "log.csv"), "--out", str(tmp_path / "store")]
    code = f"import sys; from turbogr.cli import main; sys.exit(main({arguments!r}) or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"turbogr {turbogr.__version__}\n"


def test_python_m_and_the_script_are_the_same():
    assert turbogr_process("--version").stdout == f"turbogr {turbogr.__version__}\n"


def test_every_command_module_is_listed():
    folder = Path(cli.__file__).parent / "commands"
    assert {path.stem.replace("_", "-") for path in folder.glob("[!_]*.py")} == set(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_adds_itself_with_help(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert f"usage: turbogr {name}" in capsys.readouterr().out
    parser = argparse.ArgumentParser()
    importlib.import_module(f"turbogr.commands.{name.replace('-', '_')}").add_parser(parser.add_subparsers())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["doctr"], "unknown command 'doctr'. Did you mean 'doctor'?"),
        (["zzz"], "unknown command 'zzz'. Commands:"),
        (["doctor", "--jsn", "x"], "unknown option '--jsn'. Did you mean '--json'? See turbogr doctor --help"),
        (["doctor", "--js", "x"], "unknown option '--js'."),
        (["doctor", "extra"], "unexpected argument 'extra'; see turbogr doctor --help"),
        (["doctor", "--json"], "argument --json: expected one argument; see turbogr doctor --help"),
        (["--vers"], "unknown option '--vers'. Did you mean '--version'?"),
        (["-v"], "unknown option '-v'. Did you mean '--version'?"),
        (["predict"], "unknown command 'predict'. Did you mean 'recommend'?"),
        (["fit"], "unknown command 'fit'. Did you mean 'train'?"),
        (["serv"], "unknown command 'serv'."),
        (["train", "r", "--dataset", "d", "--output", "o"], "unknown option '--dataset'. Did you mean '--data'?"),
        (["train", "r", "--otu=o"], "unknown option '--otu'. Did you mean '--out'?"),
        (["train", "r", "-o", "o"], "unknown option '-o'. Did you mean '--out'?"),
        (["train", "r", "--epochs", "3"], "unknown option '--epochs'. A setting of the recipe is changed with "),
        (
            ["train", "r", "--lr=0.1"],
            "unknown option '--lr'. A setting of the recipe is changed with --set optimizer.lr=0.1. ",
        ),
        (
            ["train", "r", "--gpu", "0"],
            "unknown option '--gpu'. A setting of the recipe is changed with --set train.device=VALUE. ",
        ),
        (["train", "r", "--continue"], "unknown option '--continue'. Did you mean '--resume'?"),
        (["train", "--recipe", "r"], "unknown option '--recipe'. RECIPE is given without an option. "),
        (["train", "--config", "r"], "unknown option '--config'. RECIPE is given without an option. "),
        (["train", "r", "--verbose"], "unknown option '--verbose'. See turbogr train --help"),
        (["train", "r", "--force"], "unknown option '--force'. See turbogr train --help"),
        (["recommend", "r", "--top-k", "5"], "unknown option '--top-k'. Did you mean '--k'?"),
        (["recommend", "r", "-n", "5"], "unknown option '-n'. Did you mean '--k'?"),
        (
            ["recommend", "r", "--format", "csv"],
            "unknown option '--format'. It is an option of turbogr export. See turbogr recommend --help",
        ),
        (["evaluate", "r", "--k", "5"], "unknown option '--k'. It is an option of turbogr recommend. "),
        (["inspect", "d", "--user", "5"], "unknown option '--user'. Did you mean '--users'?"),
        (["prepare", "csv", "f", "--sep", ";"], "unknown option '--sep'. Did you mean '--delimiter'?"),
        (["prepare", "csv", "f", "--force"], "unknown option '--force'. Did you mean '--overwrite'?"),
        (
            ["prepare", "csv", "f", "--min-events", "5"],
            "unknown option '--min-events'. Did you mean '--min-user-events' or ",
        ),
        (["prepare", "csv", "f", "--epochs", "5"], "unknown option '--epochs'. See turbogr prepare csv --help"),
        (["prepare", "--epochs", "5"], "unknown option '--epochs'. See turbogr prepare --help"),
        (["prepare", "csv", "f", "--seperator", ";"], "unknown option '--seperator'. Did you mean '--delimiter'?"),
    ],
)
def test_a_mistyped_command_line(command, capsys, arguments, sentence):
    command(lambda args: 0)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"turbogr: error: {sentence}")
    assert err.count("\n") == 1


def test_help_is_also_a_command(capsys):
    assert cli.main(["help"]) == 0
    assert "usage: turbogr [-h]" in capsys.readouterr().out
    assert cli.main(["help", "train"]) == 0
    assert "usage: turbogr train" in capsys.readouterr().out


def test_values_that_begin_with_a_dash_are_no_options(command):
    seen = []
    command(lambda args: seen.append(args.json) or 0)
    assert cli.main(["doctor", "--json=--x"]) == 0
    assert cli.main(["doctor", "--json", "-5"]) == 0
    assert seen == ["--x", "-5"]


def test_the_exit_status_is_that_of_the_command(command):
    command(lambda args: 1)
    assert cli.main(["doctor"]) == 1


def test_a_user_error_is_one_line(command, capsys, monkeypatch):
    monkeypatch.delenv("TURBOGR_TRACEBACK", raising=False)
    command(raising(UserError("no column 'usr'.\n Did you mean 'user'?")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "turbogr: error: no column 'usr'. Did you mean 'user'?\n"


def test_the_traceback_can_be_requested(command, capsys, monkeypatch):
    monkeypatch.setenv("TURBOGR_TRACEBACK", "1")
    command(raising(UserError("no")))
    assert cli.main(["doctor"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback(command):
    for bug in (AssertionError("shape"), OSError("no number"), OSError(errno.EBADF, "bad")):
        command(raising(bug))
        with pytest.raises(type(bug)):
            cli.main(["doctor"])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "out/items.bin: the disk is full"),
        (errno.EDQUOT, "out/items.bin: the disk quota"),
        (errno.EACCES, "out/items.bin: permission denied"),
        (errno.EROFS, "out/items.bin: the file system is read-only"),
        (errno.ENOTDIR, "out/items.bin: a part of the path is a file"),
    ],
)
def test_a_file_system_error_is_one_sentence(command, capsys, number, words):
    command(raising(OSError(number, os.strerror(number), "out/items.bin")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith(f"turbogr: error: {words}")


def test_a_full_disk_is_found_behind_other_exceptions(command, capsys):
    def run(args):
        try:
            raise OSError("[Errno 28] Error writing bytes to file. Detail: No space left on device")
        except OSError as error:
            raise RuntimeError("writer failed") from error

    command(run)
    assert cli.main(["doctor"]) == 2
    assert "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is not enough memory; a smaller data.batch_size"),
        (
            RuntimeError("can't allocate memory: you tried to allocate 256000000000 bytes"),
            "asked for 256.0 GB at once)",
        ),
    ],
)
def test_missing_memory_is_one_sentence(command, capsys, error, words):
    command(raising(error))
    assert cli.main(["doctor"]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1


def test_ctrl_c_is_one_line(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "turbogr: interrupted\n"


def test_sigterm_unwinds_and_is_one_line(command, capsys):
    cleaned = []

    def run(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)

    command(run)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["doctor"]) == 143
    assert capsys.readouterr().err == "turbogr: terminated\n"
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == before


SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.2)
except:
    pass
"""
PLAIN_COMMAND = """
def add_parser(subparsers):
    subparsers.add_parser("doctor").set_defaults(run=run)
"""


@pytest.fixture
def command_file(tmp_path, monkeypatch):
    """Use a module file in place of `turbogr doctor`; importing its module `swallowing` sends a signal and hides it."""

    commands = importlib.import_module("turbogr.commands")
    name_of_module = "turbogr.commands.doctor"
    before, attribute = sys.modules.get(name_of_module), vars(commands).get("doctor")

    def install(name, text):
        (tmp_path / "swallowing.py").write_text(SWALLOWS.format(name=name))
        (tmp_path / "doctor.py").write_text(text + PLAIN_COMMAND)
        monkeypatch.setattr(commands, "__path__", [str(tmp_path)])
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    def forget():
        for module in (name_of_module, "swallowing"):
            sys.modules.pop(module, None)
        vars(commands).pop("doctor", None)  # an import also sets it here, where others look it up

    yield install
    forget()
    if before is not None:
        sys.modules[name_of_module] = before
    if attribute is not None:
        vars(commands)["doctor"] = attribute


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_an_import_swallows_still_stops_us(command_file, capsys, name, status):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    command_file(name, "import swallowing\ndef run(args):\n    print('ran on')\n    return 0\n")
    assert cli.main(["doctor"]) == status
    assert "ran on" not in capsys.readouterr().out

    late = (
        "def run(args):\n    import swallowing\n    import time\n    time.sleep(9)\n    print('ran on')\n    return 0\n"
    )
    command_file(name, late)
    assert cli.main(["doctor"]) == status
    assert "ran on" not in capsys.readouterr().out
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_during_an_import_reaches_the_handler_installed_later(command_file):
    text = """
def run(args):
    import time
    from turbogr.training.stopping import StopRequest
    import swallowing
    with StopRequest() as stop:
        for _ in range(200):
            if stop:
                return 77
            time.sleep(0.01)
    return 0
"""
    importlib.import_module("turbogr.training.stopping")
    command_file("SIGINT", text)
    assert cli.main(["doctor"]) == 77


def test_an_ignored_signal_stays_ignored(command):
    def run(args):
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    command(run)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert cli.main(["doctor"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_pipe_is_not_an_error():
    code = (
        "import sys\nfrom turbogr import cli\n"
        "cli._run = lambda *ignored: [print('x' * 1000) for _ in range(10000)] and 0\n"
        "sys.exit(cli.main(['doctor']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        printed = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert printed == b""


def test_our_warnings_are_sentences_and_others_keep_their_form(command, capsys):
    def run(args):
        warnings.warn_explicit("kernels  are not built", UserWarning, str(Path(cli.__file__)), 3)
        warnings.warn_explicit("the usual split", Note, str(Path(cli.__file__)), 3)
        warnings.warn_explicit("of a library", UserWarning, "/elsewhere/library.py", 7)
        return 0

    command(run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest records warnings by replacing showwarning; the interpreter's own prints them
        warnings.showwarning = lambda message, *rest: print(f"library: {message}", file=sys.stderr)
        assert cli.main(["doctor"]) == 0
    expected = "turbogr: warning: kernels are not built\nturbogr: note: the usual split\nlibrary: of a library\n"
    assert capsys.readouterr().err == expected
