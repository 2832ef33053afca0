"""Where the reference runs: inline, on a thread, or in a process of its own."""

from __future__ import annotations

from egeria_core.evaluator.base import Evaluator
from egeria_core.evaluator.gate import LoadGate
from egeria_core.evaluator.inline import InlineEvaluator
from egeria_core.evaluator.process import ProcessEvaluator
from egeria_core.evaluator.thread import ThreadEvaluator

__all__ = ["Evaluator", "InlineEvaluator", "LoadGate", "ProcessEvaluator", "ThreadEvaluator"]
