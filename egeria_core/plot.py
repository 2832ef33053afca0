"""`egeria-plot`, which says for one release where it went."""

from __future__ import annotations


def main() -> int:
    """Say it, and exit with 1."""
    raise SystemExit("egeria-plot is gone: the project's examples/plot_history.py draws a history")
