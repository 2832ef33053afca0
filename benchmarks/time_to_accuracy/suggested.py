"""The static boundary of the fine-tuning tasks: what `suggest_boundary` proposes, once per task."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from egeria_core import FreezeController, suggest_boundary

from .tasks import Task, loss_of, make_optimizer
from .train import evaluate, make_loader

__all__ = ["settled", "suggestion_for"]

PROBE_SEED = 1000


def settled(task: Task, directory: Path) -> Task:
    """Return the task with its static boundary, proposed where none is given by hand."""
    if not task.suggest_steps:
        return task
    boundary = suggestion_for(task, directory)["boundary"]
    return replace(task, static_boundary=boundary or "")


def suggestion_for(task: Task, directory: Path) -> dict[str, Any]:
    """Return what the probe found, from the directory or by asking now.

    It trains on the training data, from a seed that no run has, and asks the validation metric.
    What it took is no part of any run's time.
    """
    name = hashlib.sha256(task.fingerprint().encode()).hexdigest()[:12]
    path = directory / f"suggested-{name}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    problem = task.make(task, PROBE_SEED, directory)

    loader = make_loader(task, problem, PROBE_SEED)
    batches = list(itertools.islice(loader, task.suggest_steps))

    def train(model: nn.Module, policy: Any) -> None:
        optimizer = make_optimizer(task, model)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        with FreezeController(model, optimizer, policy=policy, layers=task.layers) as controller:
            for step in range(task.suggest_steps):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (1 - step / task.suggest_steps)
                inputs, targets = batches[step % len(batches)]
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                controller.step()

    found = suggest_boundary(
        problem.model,
        train,
        lambda model: evaluate(model, problem, task.metric),
        higher_is_better=task.higher_is_better,
    )
    result = asdict(found) | {"text": str(found)}
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(result))
    temporary.replace(path)
    return result
