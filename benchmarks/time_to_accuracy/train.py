"""One training run, measured: the same loop for every method.

The clock runs while the run trains, and stands still while it is evaluated: making the cache and
the controller, waiting for the cache's writer at the end of each epoch, and everything that the
freezing costs are in it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.arguments import Gate

from .methods import Method
from .tasks import Problem, Task, loss_of, make_optimizer, make_schedule

__all__ = [
    "Clock",
    "Run",
    "evaluate",
    "evaluation_steps",
    "forward_shares",
    "make_loader",
    "segments",
    "train",
]

PHASES = ("data", "cut", "forward", "backward", "update", "control", "flush")


@dataclass
class Clock:
    """Wall and CPU seconds (of all threads) while it runs, and where they went."""

    wall: float = 0.0
    cpu: float = 0.0
    own_cpu: float = 0.0
    """Of the training thread alone."""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _last: float = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        self._last = wall
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        self.own_cpu += time.thread_time() - own

    def lap(self, phase: str) -> None:
        """Everything since the last lap belongs to this phase."""
        now = time.perf_counter()
        self.phases[phase] += now - self._last
        self._last = now


@dataclass
class Run:
    """What one run measured. Times are seconds, sizes bytes."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    background_cpu_seconds: float = 0.0
    """Of the threads beside the training thread: readers, writer, compression."""
    steps: int = 0
    curve: list[tuple[float, float, float, float]] = field(default_factory=list)
    """(epoch, training time, metric, processor time of all threads) at each evaluation."""
    frozen_parameters: float = 0.0
    """Mean over the steps of the frozen part of the parameters."""
    frozen_forward: float = 0.0
    """Mean over the steps of the part of a forward's arithmetic that lies in frozen layers."""
    schedule: list[tuple[int, str | None]] = field(default_factory=list)
    predicted_harm: float | None = None
    """What the policy expects its freezing to have cost, in nats; None where it expects nothing."""
    hits: int = 0
    misses: int = 0
    bytes_on_disk: int = 0
    gate: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Of the training thread. `cut`: the forwards of the two steps after a boundary moved, in which
    a cache proves where the model can be cut."""
    load_average: float = 0.0
    """Of the machine when the run began."""
    losses: list[float] = field(default_factory=list, repr=False)
    """Per step."""


@torch.no_grad()
def evaluate(model: nn.Module, problem: Problem, metric: str) -> float:
    """Return the accuracy, or the loss in bits, on the validation set."""
    was_training = model.training
    model.eval()
    total = 0.0
    for inputs, targets in zip(problem.inputs.split(256), problem.targets.split(256), strict=True):
        output = model(inputs)
        if metric == "accuracy":
            total += float((output.argmax(-1) == targets).float().mean()) * len(inputs)
        else:
            total += float(loss_of(output, targets)) / math.log(2) * len(inputs)
    model.train(was_training)
    return total / len(problem.inputs)


def forward_shares(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """Return, for each module, the part of a forward's arithmetic that is done when it returns."""
    model = copy.deepcopy(model).eval()
    done: dict[str, int] = {}
    counter = FlopCounterMode(display=False)
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, args, out, name=name: done.update({name: counter.get_total_flops()})
        )
    with counter, torch.no_grad():
        model(inputs)
    return {name: count / done[""] for name, count in done.items() if name}


def evaluation_steps(total: int, count: int) -> list[int]:
    """Return after which steps a run is evaluated: at equal parts of its schedule, and its end."""
    return sorted({max(1, round(total * (i + 1) / count)) for i in range(count)})


def segments(total: int, per_epoch: int, marks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first step, one past the last) between evaluations and ends of epochs."""
    ends = sorted({*marks, *range(per_epoch, total, per_epoch), total})
    return list(itertools.pairwise([0, *ends]))


def train(
    task: Task,
    method: Method,
    seed: int,
    directory: Path,
    *,
    problem: Problem,
    gate: Gate = "auto",
    cache_directory: Path | None = None,
    total_steps: int | None = None,
) -> Run:
    """Train once.

    Args:
        task: Data, model and schedule.
        method: What freezes, and whether it is cached.
        seed: Of the order and the augmentation; `problem` has the seed of the weights.
        directory: Where a cached run's activations live, in a directory of their own.
        problem: Its model is trained.
        gate: The cache's.
        cache_directory: Shared by several runs, instead of one in `directory`.
        total_steps: Length of the whole schedule; None: the task's epochs.
    """
    run = Run(load_average=round(os.getloadavg()[0], 2))
    model = problem.model
    shares = forward_shares(model, problem.inputs[:2])
    clock = Clock()
    torch.manual_seed(seed)
    with contextlib.ExitStack() as stack:
        with clock.running():
            optimizer = make_optimizer(task, model)
            cache: ActivationCache | None = None
            where = cache_directory or directory / f"cache-{os.getpid()}-{method.name}-{seed}"
            if method.cached:
                cache = ActivationCache(model, where, limit="4GB", gate=gate)
                stack.callback(cache.close)
            loader = make_loader(task, problem, seed, cache)
            total = total_steps or task.epochs * len(loader)
            schedule = make_schedule(task, optimizer, total)
            controller = method.control(
                task, model, optimizer, cache, schedule, per_epoch=len(loader), total=total
            )
            if controller is not None:
                stack.callback(controller.close)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        marks = evaluation_steps(total, task.epochs * task.evaluations)
        batches: Iterator[Any] = iter(())
        for begin, end in segments(total, len(loader), marks):
            if begin % len(loader) == 0:
                model.train()
                batches = iter(loader)
            with clock.running():
                for _ in range(begin, end):
                    inputs, targets = next(batches)
                    clock.lap("data")
                    loss = loss_of(model(inputs), targets)
                    moved = controller is not None and _moved(controller, len(run.losses))
                    clock.lap("cut" if moved and cache is not None else "forward")
                    optimizer.zero_grad()
                    loss.backward()
                    clock.lap("backward")
                    optimizer.step()
                    schedule.step()
                    clock.lap("update")
                    run.frozen_forward += _share(controller, shares) / total
                    run.frozen_parameters += _frozen(model, sizes) / total
                    if controller is not None:
                        controller.step(loss)
                    run.losses.append(loss.item())
                    clock.lap("control")
                if end % len(loader) == 0:
                    for _ in batches:  # the loader's own end of the epoch
                        raise AssertionError("the loader is longer than its length")
                if cache is not None:
                    cache.flush()
                    clock.lap("flush")
            if end in marks:
                metric = evaluate(model, problem, task.metric)
                run.curve.append((end / len(loader), clock.wall, metric, clock.cpu))
        if controller is not None:
            run.schedule = controller.schedule()
            run.predicted_harm = getattr(controller.policy, "spent", None)
        if cache is not None:
            stats = cache.stats()
            run.hits, run.misses, run.gate = stats.hits, stats.misses, stats.gate
            run.bytes_on_disk = stats.bytes_on_disk
    run.seconds, run.cpu_seconds, run.phases = clock.wall, clock.cpu, clock.phases
    run.background_cpu_seconds = max(0.0, clock.cpu - clock.own_cpu)
    run.steps = total
    return run


def make_loader(task: Task, problem: Problem, seed: int, cache: Any = None) -> Any:
    """Return the loader: DataLoader itself where nothing is cached."""
    generator = torch.Generator().manual_seed(seed)
    if cache is None:
        return DataLoader(
            problem.train, task.batch_size, shuffle=True, drop_last=True, generator=generator
        )
    return EgeriaLoader(
        problem.train, task.batch_size, shuffle=True, drop_last=True, generator=generator,
        cache=cache, seed=0, reuse=task.reuse, augmentation_variants=task.variants,
    )  # fmt: skip


def _share(controller: Any, shares: dict[str, float]) -> float:
    boundary = None if controller is None else controller.boundary
    return 0.0 if boundary is None else shares[boundary]


def _moved(controller: Any, step: int) -> bool:
    """Whether the boundary has moved to a module within the last two steps."""
    moves = controller.schedule()
    return bool(moves) and moves[-1][1] is not None and step - moves[-1][0] < 2


def _frozen(model: nn.Module, sizes: dict[str, int]) -> float:
    frozen = sum(sizes[name] for name, p in model.named_parameters() if not p.requires_grad)
    return frozen / sum(sizes.values())
