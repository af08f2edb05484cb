"""`python -m turbogr` is `turbogr`."""

from __future__ import annotations

import sys

from turbogr.cli import main

if __name__ == "__main__":
    sys.exit(main())
