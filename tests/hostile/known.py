"""Tries that fail today: what was seen, and why. Each fix takes a line away.

A line that is wrong in either direction fails the suite: a try that passes unexpectedly, and one
that fails in another way.
"""

from __future__ import annotations

from tests.hostile.harness import (
    Finding,
)

KNOWN: dict[str, tuple[type[Finding], str]] = {}
