from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure: examples have no deadline, and pytest-timeout ends what hangs.
settings.register_profile("turbogr", deadline=None)
settings.load_profile("turbogr")
