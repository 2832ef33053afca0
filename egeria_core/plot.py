"""`egeria-plot`, which says for one release where it went."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Say it; 2, as for any bad command."""
    print(
        "egeria-plot is no longer installed: a history is drawn by the project's "
        "examples/plot_history.py",
        file=sys.stderr,
    )
    return 2
