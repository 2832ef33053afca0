"""How much the controller's options matter: the paper's Figure 12 and Table 2 on a real task.

Varies the evaluation interval n, the window W and the tolerance T around the guideline's values,
the reference's precision, and whether one module or the whole model is the reference; each over
several seeds. Accuracy, training time without a cache, and how much stayed trainable.

    python -m benchmarks.sensitivity [--seeds 3] [--epochs 30] [--only NAME,NAME] [--quick]

Writes benchmarks/results/sensitivity.json and .png (not with --quick).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.digits_task import Outcome, Task, train
from benchmarks.harness import environment, parser, publish, pyplot, tell
from egeria_core import Bootstrap, ControllerConfig, FreezeController, find_layers
from egeria_core.policies import Measure, PlasticityPolicy
from egeria_core.reference import ActivationMeter
from egeria_core.reference.capture import Call, LayerTap, Probe
from egeria_core.watch import Meter, Watched

WINDOW, TOLERANCE = 10, 0.2


class Front(nn.Module):
    """The model up to one layer: what a whole-model reference runs to judge that layer."""

    def __init__(self, model: nn.Module, boundary: str) -> None:
        super().__init__()
        self.model = model
        self.boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        """Return the boundary's output."""
        caught: list[Tensor] = []
        module = self.model.get_submodule(self.boundary)
        handle = module.register_forward_hook(lambda m, args, output: caught.append(output))
        try:
            self.model(x)
        finally:
            handle.remove()
        return caught[0]


class _Root(nn.Module):
    """Gives the meter, which looks modules up by name, the model's front under any name."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.front = front


class WholeModelMeter(ActivationMeter):
    """Judges the front layer by a snapshot of the whole model, as the paper does.

    The same evaluator, schedule and comparison; only what is run again is another.
    """

    def __init__(self, watched: Watched) -> None:
        self._bare = watched.model
        super().__init__(watched)

    def bind(self) -> None:
        """Hook the whole model."""
        super().bind()
        if not isinstance(self._tap, _RootTap):
            self._tap.close()
            self._tap = _RootTap(self._bare)

    def measure(self, step: int, frozen: int) -> None:
        """As the one-module meter, on the model up to the front layer."""
        if frozen < len(self._tapped):
            self._model = _Root(Front(self._bare, self._tapped[frozen][-1]))
        super().measure(step, frozen)


class _RootTap(LayerTap):
    """Captures the input of the whole model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, [])
        self._input: Tensor | None = None
        self._hooks.enter_context(model.register_forward_pre_hook(self._note))

    def _note(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.armed is not None and self._input is None and torch.is_grad_enabled():
            self._input = args[0][: self.num_rows].clone()

    def take(self) -> Probe | None:
        """Return the model's input as a call of its front."""
        x, self._input = self._input, None
        super().take()
        return None if x is None else Probe([Call("front", (x,), {}, {})], len(x))


class WholeModelPolicy(PlasticityPolicy):
    """Algorithm 1 with the whole model as the reference."""

    measure: Measure = "own"
    per_layer = False

    def make_meter(self, watched: Watched) -> Meter:
        """Return what runs the whole model again."""
        return WholeModelMeter(watched)


Maker = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def maker(policy: type[PlasticityPolicy] | None = None, **changes: Any) -> Maker:
    """Return a factory; `n_factor` scales the guideline's interval."""
    factor = changes.pop("n_factor", 1.0)

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, total: int) -> Any:
        interval = ControllerConfig(total_steps=total, window=WINDOW).interval(
            len(find_layers(model)), "plasticity"
        )
        options = {
            "evaluate_every": max(1, round(interval * factor)),
            "window": WINDOW,
            "tolerance": TOLERANCE,
            "evaluator": "inline",
            "reference": "fp32",
        }
        chosen = "plasticity" if policy is None else policy(WINDOW, TOLERANCE)
        options |= {"policy": chosen, "bootstrap": Bootstrap()}
        return FreezeController(model, optimizer, **(options | changes))

    return make


def variants() -> dict[str, tuple[str, Maker | None]]:
    """Return name -> (group, factory)."""
    return {
        "no freezing": ("baseline", None),
        "guideline": ("baseline", maker()),
        "n / 2": ("n", maker(n_factor=0.5)),
        "n x 2": ("n", maker(n_factor=2.0)),
        "W = 5": ("W", maker(window=5)),
        "W = 20": ("W", maker(window=20)),
        "T = 10 %": ("T", maker(tolerance=0.1)),
        "T = 40 %": ("T", maker(tolerance=0.4)),
        "int8": ("precision", maker(reference="int8")),
        "whole model": ("reading", maker(WholeModelPolicy)),
    }


def describe(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the figures of one variant over its seeds."""

    def used(outcome: Outcome) -> list[str]:
        if outcome.controller is None:
            return []
        return sorted({r["reference"] for r in outcome.controller.history.of("reading")})

    return {
        "accuracy": [round(outcome.accuracy, 4) for outcome in outcomes],
        "seconds": [round(outcome.seconds, 2) for outcome in outcomes],
        "controller_seconds": [round(outcome.controller_seconds, 2) for outcome in outcomes],
        "mean_active": [round(outcome.mean_active, 3) for outcome in outcomes],
        "moves": [outcome.schedule for outcome in outcomes],
        "references": [used(outcome) for outcome in outcomes],
    }


def plot(report: dict[str, Any], path: Path) -> None:
    results = report["variants"]
    figure, axes = pyplot().subplots(figsize=(8, 4.5))
    groups = list(dict.fromkeys(row["group"] for row in results.values()))
    for name, row in results.items():
        x, y = statistics.mean(row["mean_active"]), statistics.mean(row["accuracy"]) * 100
        spread = (max(row["accuracy"]) - min(row["accuracy"])) * 50
        colour = f"C{groups.index(row['group'])}"
        axes.errorbar(x, y, yerr=spread, fmt="o", color=colour, capsize=2)
        axes.annotate(name, (x, y), fontsize=8, xytext=(5, 4), textcoords="offset points")
    axes.set_xlabel("mean trainable part of the parameters (less is faster)")
    axes.set_ylabel("test accuracy, % (mean and half range over the seeds)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=3)
    options_of.add_argument("--epochs", type=int, default=30)
    options_of.add_argument("--only", default="", help="comma-separated names of variants")
    options = options_of.parse_args(argv)
    if options.quick:
        options.seeds, options.epochs = 1, 4
    torch.set_num_threads(1)
    task = Task(epochs=options.epochs)
    wanted = [name for name in options.only.split(",") if name]
    chosen = {k: v for k, v in variants().items() if not wanted or k in wanted}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    # Seeds outside, variants inside: what else the machine does falls on all variants alike.
    for seed in range(options.seeds):
        for name, (_, make) in chosen.items():
            tell(f"seed {seed}, {name}")
            outcomes[name].append(train(task, seed, make))
    report = {
        "environment": environment(options.seeds),
        "task": vars(task) | {"drops": list(task.drops)},
        "variants": {
            name: {"group": chosen[name][0]} | describe(found) for name, found in outcomes.items()
        },
    }
    publish("sensitivity", report, options, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
