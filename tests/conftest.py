from __future__ import annotations

import importlib.util
import os
import pkgutil
import signal
from collections.abc import Iterator
from importlib import import_module

import pytest
from hypothesis import settings

from turbogr.ops import triton_kernels
from turbogr.option_names import command_line

# A busy machine is no failure: examples have no deadline, and pytest-timeout ends what hangs.
settings.register_profile("turbogr", deadline=None)
settings.load_profile("turbogr")

# Digits and durations must not depend on what is fastest on this machine.
os.environ["TURBOGR_GEMM"] = "torch"

# Triton decides when a kernel, one of its own included, is imported whether it is interpreted. On a machine without a
# device nothing else can be done with one in this process: `bench kernels` compiles in processes of its own.
if importlib.util.find_spec("triton"):
    with pytest.MonkeyPatch.context() as _patch:
        _patch.setenv("TRITON_INTERPRET", "1")
        for _module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
            import_module(_module.name)

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; the tests of interruption need them as in the
# foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def options_as_written() -> Iterator[None]:
    """Messages are tested as they are written, for the command line; tests/test_option_names.py tests the other form.

    A module whose tests are about what Python callers read overrides this fixture.
    """
    with command_line():
        yield
