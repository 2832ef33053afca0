"""Eight hyper-parameter settings over one frozen backbone: uncached, and sharing one cache.

Both train the same part of the network with the same frozen front, so the only difference is
whether the front is computed again. The second cached run starts with all its samples in the cache.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from .methods import METHODS
from .tasks import TASKS, Task, quick
from .train import train

__all__ = ["SWEEPS", "run_sweep", "sweep_task"]

RATES = {"sweep-head": (0.01, 0.03, 0.1, 0.3), "sweep-stage": (0.003, 0.01, 0.03, 0.1)}
"""A head alone needs larger steps, and more of them."""
DECAYS = (0.0, 1e-2)
SWEEPS = {"sweep-head": "layer3", "sweep-stage": "layer2.2"}
"""Name -> the last frozen module."""
TITLES = {
    "sweep-head": "sweep of 8, backbone frozen, a new head is trained",
    "sweep-stage": "sweep of 8, stages 1 and 2 frozen, stage 3 and a new head are trained",
}


VARIANTS = 4
"""Draws of each sample that all eight runs see: settings are compared on the same samples."""


def sweep_task(name: str, *, small: bool = False) -> Task:
    """Return the fine-tuning task whose backbone is frozen up to the sweep's boundary."""
    base = TASKS["digits-finetune"]
    task = replace(quick(base) if small else base, evaluations=1, reuse=None, variants=VARIANTS)
    layers = r"conv1|bn1|layer1|layer2\.\d|layer3|head"
    if name == "sweep-head":
        layers = r"conv1|bn1|layer\d|head"
        task = replace(task, epochs=2 * task.epochs)
    return replace(task, name=name, title=TITLES[name], static_boundary=SWEEPS[name], layers=layers)


def run_sweep(
    task: Task, *, cached: bool, seed: int, directory: Path, settings: int = 8
) -> dict[str, Any]:
    """Train with each of the settings, one after the other; return what they took and reached."""
    grid = [(lr, decay) for decay in DECAYS for lr in RATES[task.name]][:settings]
    method = METHODS["static+cache" if cached else "static"]
    runs = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="sweep-") as shared:
        for lr, decay in grid:
            own = replace(task, lr=lr, weight_decay=decay)
            # Made from the task, not from the setting: all start from the same backbone.
            problem = task.make(task, seed, directory)
            run = train(own, method, seed, directory, problem=problem, cache_directory=Path(shared))
            runs.append(run)
    return {
        "settings": [{"lr": lr, "weight_decay": decay} for lr, decay in grid],
        "seconds": sum(run.seconds for run in runs),
        "cpu_seconds": sum(run.cpu_seconds for run in runs),
        "each_s": [run.seconds for run in runs],
        "finals": [run.curve[-1][2] for run in runs],
        "hits": [run.hits for run in runs],
        "misses": [run.misses for run in runs],
        "bytes_on_disk": max(run.bytes_on_disk for run in runs),
        "gates": [run.gate for run in runs],
        "phases": {name: sum(run.phases[name] for run in runs) for name in runs[0].phases},
        "load_average": runs[0].load_average,
    }
