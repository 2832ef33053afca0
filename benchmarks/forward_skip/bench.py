"""One model with its samples, and the training steps that are compared on it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from benchmarks.models import Staged
from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.arguments import Gate
from egeria_cache.device import pinned, pins

from .tasks import Sample, Shape, Task

__all__ = ["NUM_BATCHES", "Bench", "Loop", "opened"]

NUM_BATCHES = 5
"""Distinct batches. One more than the ring holds at RING_BATCHES, so that every hit is read."""
RING_BATCHES = 1


class Samples(Dataset[Sample]):
    """A few synthetic samples in memory, as often as the real set has samples: how many will come
    is part of what `codec="auto"` decides by."""

    def __init__(self, task: Task, shape: Shape, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [task.sample(shape.size, generator) for _ in range(count)]
        self._length = task.num_samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index % len(self.rows)]


class Around:
    """Batch sampler: all batches in order, again and again, as one long epoch."""

    def __init__(self, num_batches: int, batch_size: int) -> None:
        self.batches = [
            list(range(i * batch_size, (i + 1) * batch_size)) for i in range(num_batches)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(self.batches)

    def __len__(self) -> int:
        return 1 << 30


@dataclass
class Bench:
    """One model with its samples, for all of its boundaries."""

    task: Task
    shape: Shape
    device: torch.device
    bf16: bool
    rounds: int
    full: Staged
    """All of it is trained."""
    model: Staged
    """The front is frozen; serves as the frozen, the cached and the oracle's model."""
    samples: Samples
    batches: list[list[Tensor]]
    """The samples as batches, on the host."""
    full_optimizer: torch.optim.Optimizer

    @classmethod
    def make(
        cls, task: Task, shape: Shape, device: torch.device, rounds: int, bf16: bool, build: Any
    ) -> Bench:
        """Build the model, and samples for it."""
        torch.manual_seed(0)
        model = build().to(device)
        samples = Samples(task, shape, NUM_BATCHES * shape.batch_size)
        order = Around(NUM_BATCHES, shape.batch_size).batches
        batches = [default_collate([samples[i] for i in ids]) for ids in order]
        batches = [[pinned(part, device) for part in batch] for batch in batches]
        inputs = [tuple(part.to(device) for part in batch[: task.num_inputs]) for batch in batches]
        calibrate(model, inputs[:2])
        full = copy.deepcopy(model)
        full.freeze(None)
        optimizer = task.optimizer(full)
        return cls(task, shape, device, bf16, rounds, full, model, samples, batches, optimizer)

    def on_device(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Move a batch."""
        return [tensor.to(self.device, non_blocking=True) for tensor in batch]

    def inputs(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the model takes of a batch."""
        return tuple(batch[: self.task.num_inputs])

    def autocast(self) -> Any:
        """Return the context that forwards run in."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def step(self, run: Callable[[], Any], optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Forward, loss, backward, update."""
        optimizer.zero_grad()
        with self.autocast():
            loss = self.task.loss(run(), *batch[self.task.num_inputs :])
        loss.backward()
        optimizer.step()


@torch.no_grad()
def calibrate(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> None:
    """Set BatchNorm's running statistics to those of some batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # an average over all calls
        norm.reset_running_stats()
    for one in inputs if norms else ():
        model.train()(*one)
    for norm in norms:
        norm.momentum = 0.1


class Loop:
    """The steps that are compared."""

    def __init__(self, bench: Bench, optimizer: torch.optim.Optimizer) -> None:
        self.bench, self.optimizer = bench, optimizer

    def plain(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Train on a batch from the host's memory."""
        batch = self.bench.on_device(self.bench.batches[number % NUM_BATCHES])
        self.bench.step(lambda: model(*self.bench.inputs(batch)), optimizer, batch)

    def frozen(self, number: int) -> None:
        """Train the rest behind the computed front."""
        self.plain(self.bench.model, self.optimizer, number)

    def next_of(self, steps: Iterator[Any]) -> None:
        """Train on a loader's next batch."""
        batch = self.bench.on_device(next(steps))
        self.bench.step(lambda: self.bench.model(*self.bench.inputs(batch)), self.optimizer, batch)

    def cached(self, cache: ActivationCache, steps: Iterator[Any], flush: bool = False) -> None:
        """Train on the loader's next batch. What it reads ahead, or writes, is waited for, so that
        no other step pays for it."""
        self.next_of(steps)
        if flush:
            cache.flush()
        else:
            wait_for_readers(cache)

    @torch.no_grad()
    def states(self, stop: int) -> list[tuple[Any, list[Tensor]]]:
        """Return what crosses the boundary, and the batch, on the device."""
        batches = [self.bench.on_device(batch) for batch in self.bench.batches]
        with self.bench.autocast():
            return [
                (self.bench.model.prefix(self.bench.inputs(batch), stop), batch)
                for batch in batches
            ]

    def oracle(self, states: list[tuple[Any, list[Tensor]]], stop: int, number: int) -> None:
        """Train the rest alone: nothing can be faster."""
        state, batch = states[number % NUM_BATCHES]
        self.bench.step(lambda: self.bench.model.suffix(state, stop), self.optimizer, batch)


@contextlib.contextmanager
def opened(
    bench: Bench, boundary: str, directory: Path, mode: Gate
) -> Iterator[tuple[ActivationCache, Any]]:
    with ActivationCache(
        bench.model, directory, boundary, gate=mode, ring_batches=RING_BATCHES, audit_rate=0
    ) as cache:
        yield (
            cache,
            EgeriaLoader(
                bench.samples,
                batch_sampler=Around(NUM_BATCHES, bench.shape.batch_size),
                cache=cache,
                pin_memory=pins(bench.device),
            ),
        )


def wait_for_readers(cache: ActivationCache) -> None:
    """Return once none of them reads: each has come to the same point."""
    count = cache.api.readers._max_workers
    together = threading.Barrier(count)
    for done in [cache.api.readers.submit(together.wait) for _ in range(count)]:
        done.result()
