"""Draw schedules; see `drawing`."""

from __future__ import annotations

import sys

from .drawing import main

if __name__ == "__main__":
    sys.exit(main())
