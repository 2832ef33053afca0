"""What the controller costs: `step`, the evaluator at work beside it, and the references' speed.

    python -m benchmarks.controller [--steps 300] [--every 20] [--repeats 15] [--quick]

Prints tables and writes benchmarks/results/controller.json (not with --quick). `step` is given as a
part of the training step of the same run; what the armed hooks cost in the forward is counted in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.harness import environment, parser, publish, tell
from egeria_core.config import EvaluatorKind, ReferenceKind

from .beside import slowdown
from .references import reference_speeds
from .step import step_cost


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--steps", type=int, default=300)
    options_of.add_argument("--every", type=int, default=20)
    options_of.add_argument("--repeats", type=int, default=15)
    options = options_of.parse_args(argv)
    if options.quick:
        options.steps, options.every, options.repeats = 60, 10, 3
    slower = []
    for every in (2, 16):
        tell(f"training on all cores, a reading every {every} steps")
        slower += slowdown(every, rounds=max(3, options.steps // 20))
    torch.set_num_threads(1)  # one core trains, the other is the evaluator's
    steps = []
    kinds: tuple[tuple[EvaluatorKind, ReferenceKind], ...] = (
        ("process", "fp32"), ("process", "int8"), ("inline", "fp32"),
    )  # fmt: skip
    for evaluator, reference in kinds:
        tell(f"steps beside {evaluator}, {reference}")
        steps.append(step_cost(evaluator, reference, options.steps, options.every))
    tell("references")
    report = {
        "environment": environment(seeds=1),
        "paper": {"reference_overhead": 0.015, "int8_speedup": 3.59},
        "step": steps,
        "slowdown": slower,
        "references": reference_speeds(options.repeats),
    }
    publish("controller", report, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
