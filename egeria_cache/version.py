"""The version of both packages, for all who ask."""

from __future__ import annotations

__version__ = "0.1.0"
