"""The demo's figures, as one of the results: three acts, plain PyTorch against Egeria.

    python -m benchmarks.demo [--seed 0] [--repeats 3] [--quick]

Runs examples/demo.py several times and writes what its table shows to benchmarks/results/demo.json,
and its figure beside it (not with --quick). Only the times differ from one repetition to the next:
of each act the repetition is kept whose speed-up is the median.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import demo
import demo_report

from benchmarks.harness import RESULTS, environment, parser, publish


def medians(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each act as it was in the repetition with the median speed-up."""
    acts = zip(*(one["acts"] for one in results), strict=True)
    return [sorted(own, key=demo_report.speedup)[len(own) // 2] for own in acts]


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that people compare, from the demo's own files, one per repetition."""
    return {
        "settings": results[0]["settings"],
        "repeats": len(results),
        "acts": [_act(one) for one in medians(results)],
    }


def _act(one: dict[str, Any]) -> dict[str, Any]:
    act, plain, egeria = one["act"], one["plain"], one["egeria"]
    found = {
        "title": act["title"],
        "epochs": act["epochs"],
        "plain_s": round(plain["seconds"][-1], 2),
        "egeria_s": round(egeria["seconds"][-1], 2),
        "speedup": round(demo_report.speedup(one), 3),
        "plain_accuracy": round(plain["accuracies"][-1], 5),
        "egeria_accuracy": round(egeria["accuracies"][-1], 5),
        "hits": egeria["hits"],
        "hit_rates": [round(rate, 4) for rate in egeria["hit_rates"]],
        "samples": egeria["samples"],
        "bytes_on_disk": egeria["bytes_on_disk"],
    }
    if act["is_finetuning"] and act["augments"]:
        return found
    if act["is_finetuning"]:
        return found | {"largest_loss_difference": demo_report.difference(one)}
    return found | {
        "moves": [[move["step"], move["boundary"]] for move in egeria["moves"]],
        "predicted_cost": round(demo_report.predicted(one), 5),
        "measured_cost": round(demo_report.cost(one), 5),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and write its figures."""
    options_of = parser(__doc__)
    options_of.add_argument("--seed", type=int, default=0)
    options_of.add_argument("--repeats", type=int, default=3)
    options = options_of.parse_args(argv)
    results = []
    for _ in range(1 if options.quick else options.repeats):
        with tempfile.TemporaryDirectory() as place:
            flags = ["--seed", str(options.seed), "--out", place, *["--quick"] * options.quick]
            if code := demo.main(flags):
                return code
            results.append(json.loads((Path(place) / "demo.json").read_text()))
    if not options.quick:
        demo_report.save_figure(RESULTS / "demo.png", {"acts": medians(results)})
    publish("demo", {"environment": environment([options.seed]), **summary(results)}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
