from __future__ import annotations

import signal

from hypothesis import settings

# A busy machine is no failure: examples have no deadline, and pytest-timeout ends what hangs.
settings.register_profile("turbogr", deadline=None)
settings.load_profile("turbogr")

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; the tests of interruption need them as in the
# foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
