"""Does plasticity see what post-hoc analysis sees, and at what cost?

Trains on real data and, at every epoch, reads each layer's plasticity: the SP loss of the layer
against its snapshot of one epoch before, on the same input (one-module), and of the whole model
against its snapshot (whole-model). Afterwards, knowing the final weights, computes each layer's
distance from its final state with PWCCA and linear CKA, and reports per layer the Spearman
correlation of the curves over the epochs, and the costs.

    python -m benchmarks.plasticity_validation [--seeds 3] [--epochs 30] [--quick]

Writes benchmarks/results/plasticity_validation.json and .png (not with --quick).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.digits_task import Task, load, train
from benchmarks.harness import environment, in_turns, parser, publish, pyplot
from egeria_core import find_layers, sp_loss
from egeria_core.reference.capture import copy_modules

PROBE_ROWS = 32


def pwcca_distance(x: Tensor, y: Tensor) -> float:
    """1 - projection-weighted CCA (Morcos et al. 2018) of (N, P) and (N, Q), weighted by x."""
    x = x - x.mean(0)
    y = y - y.mean(0)
    qx, qy = _basis(x), _basis(y)
    u, s, _ = torch.linalg.svd(qx.T @ qy, full_matrices=False)
    weights = ((qx @ u).T @ x).abs().sum(1)
    return float(1 - (weights * s.clamp(max=1)).sum() / weights.sum())


def _basis(x: Tensor) -> Tensor:
    """Orthonormal basis of the columns, without directions that hold nothing."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    kept: Tensor = u[:, s > 1e-5 * s[0]]
    return kept


def cka_distance(x: Tensor, y: Tensor) -> float:
    """1 - linear CKA (Kornblith et al. 2019)."""
    x = x - x.mean(0)
    y = y - y.mean(0)
    return float(1 - (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))


def channels_last(act: Tensor) -> Tensor:
    """Every spatial position is a data point, every channel a neuron, as in SVCCA's own code."""
    act = act.double()
    return act.permute(0, 2, 3, 1).reshape(-1, act.shape[1]) if act.dim() == 4 else act


def rank(values: list[float]) -> Tensor:
    order = torch.tensor(values, dtype=torch.float64).argsort()
    ranks = torch.empty(len(values), dtype=torch.float64)
    ranks[order] = torch.arange(len(values), dtype=torch.float64)
    return ranks


def spearman(a: list[float], b: list[float]) -> float:
    x, y = rank(a), rank(b)
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))


@torch.no_grad()
def activations(model: nn.Module, names: list[str], images: Tensor) -> tuple[Any, Any]:
    """Return inputs and outputs of the named modules in inference mode."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    handles = []
    for name in names:

        def hook(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            inputs[name], outputs[name] = args[0], output

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    training = model.training
    model.eval()(images)
    model.train(training)
    for handle in handles:
        handle.remove()
    return inputs, outputs


def one_seed(task: Task, seed: int) -> dict[str, Any]:
    """Return plasticity, PWCCA and CKA curves per layer."""
    _, _, images, _ = load(task.size)
    snapshots: list[nn.Module] = []

    def keep(epoch: int, model: nn.Module) -> None:
        snapshots.extend(copy_modules([model]))

    outcome = train(task, seed, on_epoch=keep)
    names = [layer.boundary for layer in find_layers(snapshots[0])][:-1]
    rows = images[:PROBE_ROWS]
    curves: dict[str, Any] = {
        kind: {name: [] for name in names}
        for kind in ("plasticity", "plasticity_whole_model", "pwcca", "cka")
    }
    _, final = activations(snapshots[-1], names, images)
    for old, now in itertools.pairwise(snapshots):
        inputs, probe_now = activations(now, names, rows)
        _, probe_old = activations(old, names, rows)
        _, act = activations(now, names, images)
        for name in names:
            with torch.no_grad():
                reference = old.get_submodule(name)(inputs[name])
            curves["plasticity"][name].append(float(sp_loss(probe_now[name], reference)))
            curves["plasticity_whole_model"][name].append(
                float(sp_loss(probe_now[name], probe_old[name]))
            )
            x, y = channels_last(act[name]), channels_last(final[name])
            curves["pwcca"][name].append(pwcca_distance(x, y))
            curves["cka"][name].append(cka_distance(x, y))
    # At the last epoch a layer is its final state: the distance is 0 by definition.
    for kind in curves:
        for name in names:
            curves[kind][name].pop()
    return {"curves": curves, "accuracy": outcome.accuracy, "costs": costs(act, final, names)}


def _on_channels(distance: Callable[[Tensor, Tensor], float], pair: tuple[Tensor, Tensor]) -> float:
    return distance(channels_last(pair[0]), channels_last(pair[1]))


def costs(act: Any, final: Any, names: list[str]) -> dict[str, Any]:
    """Return the cost of one comparison of each layer, on the probe's rows and on the test set."""
    result: dict[str, Any] = {}
    for name in names:
        small = act[name][:PROBE_ROWS], final[name][:PROBE_ROWS]
        large = act[name], final[name]
        uses: dict[str, Callable[[], object]] = {
            "sp_ms": partial(sp_loss, *small),
            "pwcca_same_rows_ms": partial(_on_channels, pwcca_distance, small),
            "pwcca_test_set_ms": partial(_on_channels, pwcca_distance, large),
            "cka_test_set_ms": partial(_on_channels, cka_distance, large),
        }
        times = in_turns(itertools.repeat(uses, 10), warm_up=1).wall
        result[name] = {key: times.median(key) * 1e3 for key in uses}
    return result


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(runs[0]["curves"]["pwcca"])
    table: dict[str, Any] = {}
    for name in names:
        row = {}
        for ours in ("plasticity", "plasticity_whole_model"):
            for theirs in ("pwcca", "cka"):
                values = [
                    spearman(run["curves"][ours][name], run["curves"][theirs][name]) for run in runs
                ]
                row[f"{ours}~{theirs}"] = [round(value, 3) for value in values]
        cost = {
            key: round(sum(run["costs"][name][key] for run in runs) / len(runs), 3)
            for key in runs[0]["costs"][name]
        }
        cost["pwcca_over_sp_same_rows"] = round(cost["pwcca_same_rows_ms"] / cost["sp_ms"], 1)
        cost["pwcca_over_sp_as_used"] = round(cost["pwcca_test_set_ms"] / cost["sp_ms"], 1)
        table[name] = {"spearman": row, "cost": cost}
    return table


def plotter(curves: dict[str, Any]) -> Callable[[Any, Path], None]:
    """Return what draws one seed's curves."""

    def plot(report: dict[str, Any], path: Path) -> None:
        kinds = ("plasticity", "plasticity_whole_model", "pwcca", "cka")
        titles = ("plasticity, one module", "plasticity, whole model", "1 - PWCCA", "1 - CKA")
        figure, all_axes = pyplot().subplots(1, 4, figsize=(15, 3.4))
        for axes, kind, title in zip(all_axes, kinds, titles, strict=True):
            for name, curve in curves[kind].items():
                axes.plot(range(1, len(curve) + 1), curve, label=name, linewidth=1.2)
            axes.set_yscale("log")
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("epoch")
        all_axes[0].legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, dpi=110)

    return plot


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=3)
    options_of.add_argument("--epochs", type=int, default=30)
    options = options_of.parse_args(argv)
    if options.quick:
        options.seeds, options.epochs = 1, 4
    torch.set_num_threads(1)
    task = Task(epochs=options.epochs)
    runs = [one_seed(task, seed) for seed in range(options.seeds)]
    report = {
        "environment": environment(options.seeds),
        "task": vars(task) | {"drops": list(task.drops)},
        "accuracy": [run["accuracy"] for run in runs],
        "layers": summarise(runs),
    }
    publish("plasticity_validation", report, options, plot=plotter(runs[0]["curves"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
