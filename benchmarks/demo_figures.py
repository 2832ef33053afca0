"""The demo's figures, as one of the results: a ResNet on handwritten digits, three ways.

    python benchmarks/demo_figures.py [--epochs 40] [--seed 0] [--quick]

Runs examples/demo.py and writes what its table shows to benchmarks/results/demo.json (not with
--quick).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo
from bench_environment import environment

RESULTS = Path(__file__).parent / "results"


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that people compare, from the demo's own file."""
    target = result["settings"]["target"]
    cache = result["cache"]
    return {
        "settings": result["settings"],
        "runs": [_run(demo.Run(**run), target) for run in result["runs"]],
        "hits": cache["hits"],
        "misses": cache["misses"],
        "bytes_on_disk": cache["bytes_on_disk"],
        "compression_ratio": round(cache["compression_ratio"], 3),
        "gate": cache["gate"],
        "steps": len(result["runs"][0]["losses"]),
        "largest_loss_difference": result["largest_loss_difference"],
        "schedule": result["schedule"],
    }


def _run(run: demo.Run, target: float) -> dict[str, Any]:
    reached = run.time_to(target)
    return {
        "name": run.name,
        "seconds": round(run.seconds[-1], 2),
        "seconds_to_target": None if reached is None else round(reached, 2),
        "final_accuracy": round(run.accuracies[-1], 5),
        "mean_frozen": round(sum(run.frozen) / len(run.frozen), 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=demo.Settings.epochs)
    parser.add_argument("--seed", type=int, default=demo.Settings.seed)
    parser.add_argument("--quick", action="store_true", help="4 epochs, and write no results")
    options = parser.parse_args(argv)
    epochs = 4 if options.quick else options.epochs
    with tempfile.TemporaryDirectory() as place:
        flags = ["--epochs", str(epochs), "--seed", str(options.seed), "--out", place]
        if code := demo.main(flags):
            return code
        result = json.loads((Path(place) / "demo.json").read_text())
    if not options.quick:
        report = {"environment": environment([options.seed]), **summary(result)}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
