"""Errors of the controller; they join the tree of `egeria_cache.errors`."""

from __future__ import annotations

from egeria_cache import EgeriaError


class LayerError(EgeriaError):
    """The model offers no layers that could be frozen one after another."""


class PolicyError(EgeriaError):
    """A freezing policy answered, or was given, something impossible."""


class EvaluatorError(EgeriaError):
    """The reference could not be built, run or reached."""
