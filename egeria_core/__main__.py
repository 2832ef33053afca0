"""`python -m egeria_core`: versions, and what is at hand here; for bug reports."""

from __future__ import annotations

import sys

from egeria_cache.__main__ import main

sys.exit(main())
