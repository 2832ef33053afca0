"""What is measured of one model at one boundary: see `measure`."""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forward_skip_tasks import Sample, Shape, Task
from models import Staged
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from egeria_cache import ActivationCache, ActivationStore, EgeriaLoader
from egeria_cache.prefetch import ACTIVATION, NUM_READERS

NUM_BATCHES = 5
"""Distinct batches. One more than the ring holds at RING_BATCHES, so that every hit is read."""
NUM_PAIRS = 3
"""Of them, how many are computed and stored beside a step that only computes."""
RING_BATCHES = 1
CODECS = ("raw", "zstd", "split+zstd", "bitmap+split", "auto")
MAX_GATE_HITS = 17
SAME = 0.05
"""Where hits and computed steps differ by less, either decision of the gate counts as right."""


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
    warm: set[str] = field(default_factory=set)

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
        if device.type == "cuda":
            batches = [[part.pin_memory() for part in batch] for batch in batches]
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

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, use: Callable[[], object]) -> float:
        """Time a call, until the device is done."""
        self.synchronize()
        started = time.perf_counter()
        use()
        self.synchronize()
        return time.perf_counter() - started


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


def measure(bench: Bench, boundary: str, stop: int, directory: Path) -> dict[str, Any]:
    """Measure one boundary; see the fields of the result.

    1. A cache with gate="always" is filled: steps that capture and store beside steps of the frozen
       model alone, in pairs.
    2. In rounds, one step each of: full, frozen, all hits, oracle; each in turns.
    3. In a cache of its own, a plain training loop with gate="auto", until the gate has decided.

    A step that stores waits until all is on disk, and a hit until the reading ahead is done: what
    is overlapped in training is paid in full here. `write_extra_s` is an upper bound, and so is
    `break_even_epoch`, 1 + (what the first epoch pays) / (what every later one saves).
    """
    bench.model.freeze(stop)
    optimizer = bench.task.optimizer(bench.model)
    loop = Loop(bench, optimizer)
    with opened(bench, boundary, directory / "always", "always") as (cache, loader):
        steps = iter(loader)
        written = [bench.seconds(lambda: loop.cached(cache, steps, flush=True))]
        paired_frozen: list[float] = []
        for number in range(1, 1 + NUM_PAIRS):
            uses = [partial(loop.frozen, number), partial(loop.cached, cache, steps, flush=True)]
            order = (0, 1) if number % 2 else (1, 0)
            times = {i: bench.seconds(uses[i]) for i in order}
            paired_frozen.append(times[0])
            written.append(times[1])
        for _ in range(1 + NUM_PAIRS, NUM_BATCHES):
            loop.cached(cache, steps, flush=True)
        filled = cache.stats()
        states = loop.states(stop)
        variants: dict[str, Callable[[int], object]] = {
            "full": lambda n: loop.plain(bench.full, bench.full_optimizer, n),
            "frozen": loop.frozen,
            "hit": lambda n: loop.cached(cache, steps),
            "oracle": lambda n: loop.oracle(states, stop, n),
        }
        times_s, work_s = in_turns(bench, variants)
        stats = cache.stats()
        raw_bytes, codecs = compression(cache, loader, bench, directory)
    expected = bench.rounds * bench.shape.batch_size
    median = {name: statistics.median(times) for name, times in times_s.items()}
    extra_s = max(0.0, statistics.median(
        w - f for w, f in zip(written[1:], paired_frozen, strict=True)
    ))  # fmt: skip
    saving_s = statistics.median(
        f - h for f, h in zip(times_s["frozen"], times_s["hit"], strict=True)
    )
    hit_vs_frozen = ratio(times_s, "hit", "frozen")
    stored = filled.stored_bytes / max(1, filled.num_samples)
    input_bytes = sum(tensor.nbytes for tensor in bench.inputs(bench.samples[0]))
    return {
        "boundary": boundary,
        "share": round(stop / len(bench.model.layers), 3),
        "frozen_parameters": round(frozen_part(bench.model), 3),
        "step_s": {name: round(value, 4) for name, value in median.items()},
        "times_s": {name: [round(one, 4) for one in times] for name, times in times_s.items()},
        "work_s": {name: round(statistics.median(work), 4) for name, work in work_s.items()},
        "frozen_vs_full": ratio(times_s, "frozen", "full"),
        "hit_vs_full": ratio(times_s, "hit", "full"),
        "hit_vs_frozen": hit_vs_frozen,
        "oracle_vs_full": ratio(times_s, "oracle", "full"),
        "hit_vs_oracle": ratio(times_s, "hit", "oracle"),
        "hit_vs_oracle_work": ratio(work_s, "hit", "oracle"),
        "all_hits": stats.hits == expected,
        "input_bytes": input_bytes,
        "raw_bytes": raw_bytes,
        "stored_bytes": round(stored),
        "stored_vs_input": round(stored / input_bytes, 2),
        "codecs": codecs,
        "data_set_bytes": round(stored * bench.task.num_samples),
        "first_batch_s": round(written[0], 3),
        "write_extra_s": round(extra_s, 4),
        "break_even_epoch": round(1 + extra_s / saving_s, 2) if saving_s > 0 else None,
        "gate": judged(gate(bench, boundary, directory / "auto", loop), boundary, hit_vs_frozen),
    }


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

    def cached(self, cache: ActivationCache, steps: Iterator[Any], flush: bool = False) -> None:
        """Train on the loader's next batch. What it reads ahead, or writes, is waited for, so that
        no other step pays for it."""
        batch = self.bench.on_device(next(steps))
        self.bench.step(lambda: self.bench.model(*self.bench.inputs(batch)), self.optimizer, batch)
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
    bench: Bench, boundary: str, directory: Path, mode: str
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
                pin_memory=bench.device.type == "cuda",
            ),
        )


def wait_for_readers(cache: ActivationCache) -> None:
    barrier = threading.Barrier(NUM_READERS)
    for done in [cache.port.readers.submit(barrier.wait) for _ in range(NUM_READERS)]:
        done.result()


Times = dict[str, list[float]]


def in_turns(bench: Bench, variants: dict[str, Callable[[int], object]]) -> tuple[Times, Times]:
    """Run all in turns, back and forth, after one warm-up; return the seconds of each, and the
    processor seconds of all threads, which a busy machine hardly changes."""
    for name in {"full", "oracle"} - bench.warm:  # the others have run before
        variants[name](0)
    bench.warm.add("full")
    times: Times = {name: [] for name in variants}
    work: Times = {name: [] for name in variants}
    for number in range(bench.rounds):
        names = list(variants)
        for name in names if number % 2 else names[::-1]:
            worked = time.process_time()
            times[name].append(bench.seconds(partial(variants[name], number)))
            work[name].append(time.process_time() - worked)
    return times, work


def ratio(times: Times, of: str, to: str) -> float:
    """Return the median over the rounds of one step's time to another's of the same round."""
    return round(statistics.median(a / b for a, b in zip(times[of], times[to], strict=True)), 3)


def frozen_part(model: nn.Module) -> float:
    count = sum(p.numel() for p in model.parameters())
    return sum(p.numel() for p in model.parameters() if not p.requires_grad) / count


def compression(
    cache: ActivationCache, loader: Any, bench: Bench, directory: Path
) -> tuple[int, dict[str, dict[str, float]]]:
    """Store some captured activations with each codec; raw bytes a sample, and per codec."""
    view = cache.port.views(loader.source.key)[0]
    ids = list(range(min(16, len(bench.samples.rows))))
    read, _ = view.generation.get_batch(ids, variant=0)
    rows = {name: value for name, value in read.items() if name.startswith(ACTIVATION)}
    raw = sum(value.nbytes for value in rows.values()) // len(ids)
    result = {}
    for codec in CODECS:
        with contextlib.closing(ActivationStore(directory / codec, codec=codec)) as store:
            store.put_batch(ids, rows)
            store.flush()
            size = store.stats().stored_bytes / len(ids)
        result[codec] = {"bytes": round(size), "ratio": round(raw / size, 3)}
    return raw, result


def gate(bench: Bench, boundary: str, directory: Path, loop: Loop) -> dict[str, Any]:
    """Train with gate="auto" until it has decided; say where it cuts then, if at all, and why."""
    with opened(bench, boundary, directory, "auto") as (cache, loader):
        steps, num_hits = iter(loader), 0
        served: list[float] = []
        computed: list[float] = []

        def step() -> bool:
            hits = cache.stats().hits
            started = time.perf_counter()
            batch = bench.on_device(next(steps))
            bench.step(lambda: bench.model(*bench.inputs(batch)), loop.optimizer, batch)
            bench.synchronize()
            is_hit = cache.stats().hits > hits
            (served if is_hit else computed).append(time.perf_counter() - started)
            return is_hit

        for _ in range(3 * NUM_BATCHES + MAX_GATE_HITS):
            num_hits += step()
            if num_hits == MAX_GATE_HITS or (num_hits and not cache.port.views(loader.source.key)):
                break
        views = cache.port.views(loader.source.key)
        why = cache.stats().gate
    return {
        "skips": bool(views),
        "cut": views[0].cut.boundary if views else None,
        "reason": why.removeprefix("'train': "),
        "served_s": round(statistics.median(served), 4) if served else None,
        # The first one or two find the cut.
        "computed_s": round(statistics.median(computed[1:]), 4) if computed[1:] else None,
    }


def judged(decision: dict[str, Any], boundary: str, hit_vs_frozen: float) -> dict[str, Any]:
    """Say whether the gate was right: to skip where hits are faster, to compute where not."""
    if not decision["skips"]:
        return decision | {"right": hit_vs_frozen > 1 - SAME}
    measured = hit_vs_frozen
    if decision["cut"] != boundary and decision["served_s"] and decision["computed_s"]:
        # At an earlier cut than was measured above, its own steps are all there is.
        measured = decision["served_s"] / decision["computed_s"]
    return decision | {"right": measured < 1 + SAME}
