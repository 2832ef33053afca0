"""The demo's figures, as one of the results: a ResNet on handwritten digits, three ways.

    python benchmarks/demo_figures.py [--epochs 40] [--seed 0] [--repeats 3] [--quick]

Runs examples/demo.py several times and writes what its table shows to benchmarks/results/demo.json
(not with --quick). Only the times differ from one repetition to the next: of them, and of each
run's ratio to the plain one of the same repetition, the median is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo
from bench_environment import environment

RESULTS = Path(__file__).parent / "results"


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that people compare, from the demo's own files, one per repetition."""
    result = results[0]
    cache, target = result["cache"], result["settings"]["target"]
    repeated = [[demo.Run(**run) for run in one["runs"]] for one in results]
    plain_s = [runs[0].seconds[-1] for runs in repeated]
    return {
        "settings": result["settings"],
        "repeats": len(results),
        "runs": [_run(runs, plain_s, target) for runs in zip(*repeated, strict=True)],
        "hits": cache["hits"],
        "misses": cache["misses"],
        "bytes_on_disk": cache["bytes_on_disk"],
        "compression_ratio": round(cache["compression_ratio"], 3),
        "gate": cache["gate"],
        "steps": len(result["runs"][0]["losses"]),
        "largest_loss_difference": max(one["largest_loss_difference"] for one in results),
        "schedule": result["schedule"],
    }


def _run(runs: Sequence[demo.Run], plain_s: Sequence[float], target: float) -> dict[str, Any]:
    """Summarise the repetitions of one run, beside the times of the plain ones."""
    seconds = [run.seconds[-1] for run in runs]
    ratio = statistics.median(own / plain for own, plain in zip(seconds, plain_s, strict=True))
    reached = [when for run in runs if (when := run.time_to(target)) is not None]
    return {
        "name": runs[0].name,
        "seconds": round(statistics.median(seconds), 2),
        "ratio": round(ratio, 3),
        "seconds_to_target": round(statistics.median(reached), 2) if reached else None,
        "final_accuracy": round(runs[0].accuracies[-1], 5),
        "mean_frozen": round(sum(runs[0].frozen) / len(runs[0].frozen), 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=demo.Settings.epochs)
    parser.add_argument("--seed", type=int, default=demo.Settings.seed)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once 4 epochs, and write no results")
    options = parser.parse_args(argv)
    epochs, repeats = (4, 1) if options.quick else (options.epochs, options.repeats)
    results = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as place:
            flags = ["--epochs", str(epochs), "--seed", str(options.seed), "--out", place]
            if code := demo.main(flags):
                return code
            results.append(json.loads((Path(place) / "demo.json").read_text()))
    report = {"environment": environment([options.seed]), **summary(results)}
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
