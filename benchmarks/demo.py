"""The demo's figures, as one of the results: a ResNet on handwritten digits, three ways.

    python -m benchmarks.demo [--epochs 40] [--seed 0] [--repeats 3] [--quick]

Runs examples/demo.py several times and writes what its table shows to benchmarks/results/demo.json
(not with --quick). Only the times differ from one repetition to the next: of them, and of each
run's ratio to the plain one of the same repetition, the median is kept.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import demo

from benchmarks.harness import Times, environment, parser, publish


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that people compare, from the demo's own files, one per repetition."""
    result = results[0]
    cache, target = result["cache"], result["settings"]["target"]
    repeated = [[demo.Run(**run) for run in one["runs"]] for one in results]
    runs = list(zip(*repeated, strict=True))
    times = Times({own[0].name: [run.seconds[-1] for run in own] for own in runs})
    return {
        "settings": result["settings"],
        "repeats": len(results),
        "runs": [_run(own, times, plain=runs[0][0].name, target=target) for own in runs],
        "hits": cache["hits"],
        "misses": cache["misses"],
        "bytes_on_disk": cache["bytes_on_disk"],
        "compression_ratio": round(cache["compression_ratio"], 3),
        "gate": cache["gate"],
        "steps": len(result["runs"][0]["losses"]),
        "largest_loss_difference": max(one["largest_loss_difference"] for one in results),
        "schedule": result["schedule"],
    }


def _run(runs: Sequence[demo.Run], times: Times, *, plain: str, target: float) -> dict[str, Any]:
    """Summarise the repetitions of one run, beside the times of the plain ones."""
    name = runs[0].name
    reached = [when for run in runs if (when := run.time_to(target)) is not None]
    return {
        "name": name,
        "seconds": round(times.median(name), 2),
        "ratio": round(times.ratio(name, plain), 3),
        "seconds_to_target": round(statistics.median(reached), 2) if reached else None,
        "final_accuracy": round(runs[0].accuracies[-1], 5),
        "mean_frozen": round(sum(runs[0].frozen) / len(runs[0].frozen), 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and write its figures."""
    options_of = parser(__doc__)
    options_of.add_argument("--epochs", type=int, default=demo.Settings.epochs)
    options_of.add_argument("--seed", type=int, default=demo.Settings.seed)
    options_of.add_argument("--repeats", type=int, default=3)
    options = options_of.parse_args(argv)
    if options.quick:
        options.epochs, options.repeats = 4, 1
    results = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as place:
            flags = ["--epochs", str(options.epochs), "--seed", str(options.seed), "--out", place]
            if code := demo.main(flags):
                return code
            results.append(json.loads((Path(place) / "demo.json").read_text()))
    publish("demo", {"environment": environment([options.seed]), **summary(results)}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
