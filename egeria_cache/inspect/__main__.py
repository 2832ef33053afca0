"""`python -m egeria_cache.inspect`: `cache-inspect`, where its script is not on the path."""

from __future__ import annotations

import sys

from egeria_cache.inspect import main

sys.exit(main())
