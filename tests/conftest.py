from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from turbogr.option_names import command_line

# A busy machine is no failure: examples have no deadline, and pytest-timeout ends what hangs.
settings.register_profile("turbogr", deadline=None)
settings.load_profile("turbogr")

# Digits and durations must not depend on what is fastest on this machine.
os.environ["TURBOGR_GEMM"] = "torch"

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
