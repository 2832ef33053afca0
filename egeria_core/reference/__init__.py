"""References: the front layer as it was, in the precision that pays, behind one protocol."""

from __future__ import annotations

from egeria_core.reference.apart import RandomNumbersApart
from egeria_core.reference.base import Reference, cast_calls, run_layer
from egeria_core.reference.choose import ReferenceChain
from egeria_core.reference.floating import FloatReference
from egeria_core.reference.int8 import DynamicInt8Reference, StaticInt8Reference

__all__ = [
    "DynamicInt8Reference",
    "FloatReference",
    "RandomNumbersApart",
    "Reference",
    "ReferenceChain",
    "StaticInt8Reference",
    "cast_calls",
    "run_layer",
]
