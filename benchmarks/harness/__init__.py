"""How every benchmark measures and what it says of itself: turns, medians, machine, output."""

from benchmarks.harness.machine import environment
from benchmarks.harness.output import RESULTS, keep, parser, print_report, publish, pyplot, tell
from benchmarks.harness.turns import Round, Times, in_turns, percentiles_ms, seconds

__all__ = [
    "RESULTS",
    "Round",
    "Times",
    "environment",
    "in_turns",
    "keep",
    "parser",
    "percentiles_ms",
    "print_report",
    "publish",
    "pyplot",
    "seconds",
    "tell",
]
