"""A small step of hits, the whole way from disk, beside an oracle; and where its time goes.

    python -m benchmarks.small_step [--batch-size 10 ...] [--rounds 12] [--threads 1] [--quick]

The oracle trains the active part alone, on batches of activations that are in memory already. Both
train the same stretch of batches in turns, in one process. A ratio is the median over the rounds of
one's median step to the other's; of whole stretches and of processor time (all threads) likewise.
`read already` has every batch of the stretch read before its first step: what is left is not
reading. The parts are timed in stretches of their own, by timers around the named functions, on the
training thread alone, in what each spends itself: medians over the steps; audits, of which there is
one in few steps, are left out. Writes benchmarks/results/small_step.json (not with --quick).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from benchmarks.harness import environment, in_turns, parser, publish
from benchmarks.models import CifarResNet
from egeria_cache import ActivationCache, EgeriaLoader, batch, prefetch
from egeria_cache.cache import loader_api
from egeria_cache.gate import policy
from egeria_cache.loader import assembly, one_pass, plan
from egeria_cache.skip import engine
from egeria_cache.skip.serve import call, placeholder, replay
from egeria_cache.skip.serve.plan import PlanCache

STOP = 8
"""Layers of nine that are frozen."""
BATCHES = 96
"""Of a stretch."""
WARM_UP = 2
SIZES = (10, 48)
"""Samples of a batch: the oracle's steps take about 2 and 8 ms on one core."""
MODEL, ORACLE, AUDITS = "the model's forward, beyond the oracle's", "oracle", "audits"
NAMED = (
    ("planning ahead", plan.Planner, "top_up"),
    ("planning ahead", plan.Planner, "_draw"),
    ("planning ahead", plan.Planner, "take"),
    ("looking up what is stored", plan.Planner, "_plans"),
    ("DataLoader's own iterator", _SingleProcessDataLoaderIter, "_next_data"),
    ("handing reads in", prefetch.Prefetcher, "start"),
    ("waiting for reads", prefetch.PlannedEntry, "ready"),
    ("reading", prefetch.Prefetcher, "read_now"),
    ("putting the batch together", assembly.Assembly, "assemble"),
    ("putting the batch together", assembly.Assembly, "_batch"),
    ("tagged tensors", batch, "without_data"),
    ("tagged tensors", batch.BatchTensor, "__torch_function__"),
    ("the rest of next()", one_pass.Pass, "__next__"),
    ("gate: timing of whole steps", loader_api.LoaderApi, "note_step"),
    ("taking the call apart", call.Invocation, "of"),
    ("taking the call apart", call.Invocation, "key"),
    ("guards", engine.SkipEngine, "_compare"),
    ("finding the recipe", PlanCache, "find"),
    (AUDITS, engine.SkipEngine, "_audit"),
    ("counting", policy.Counters, "batch"),
    ("rows of the entry", prefetch.PlannedEntry, "load"),
    ("what is left out", placeholder.Scene, "leave_out"),
    ("skipped modules' calls", replay.PrefixRun, "__call__"),
    ("the model's code on placeholders", placeholder.Placeholder, "__torch_dispatch__"),
    ("replay", replay, "replay"),
    ("the rest of the engine", engine.SkipEngine, "_called_with"),
)


class Task:
    """A frozen front with its cache, and the same model's active part fed from memory."""

    def __init__(self, directory: Path, batch_size: int) -> None:
        torch.manual_seed(0)
        count = BATCHES * batch_size
        self.images, self.targets = torch.randn(count, 3, 32, 32), torch.randint(10, (count,))
        self.model = CifarResNet(3)
        self.model.freeze(STOP)
        self.oracle = copy.deepcopy(self.model)
        self.cache = ActivationCache(self.model, directory, self.model.layers[STOP - 1])
        self.engine = self.cache.api.engine
        self.loader = EgeriaLoader(
            TensorDataset(self.images, self.targets), batch_size, shuffle=True, cache=self.cache
        )
        with torch.no_grad():
            self.memory = [
                (self.oracle.prefix((x,), STOP), y)
                for x, y in zip(
                    self.images.split(batch_size), self.targets.split(batch_size), strict=True
                )
            ]
        self._optimizers = {id(m): self._optimizer(m) for m in (self.model, self.oracle)}
        self.cache.api.policy._may_postpone = False
        # Here the gate measures and judges as always, and nothing follows from it.
        vars(self.cache.api.policy)["step"] = self._measured(self.cache.api.policy.step)
        for _ in range(3):  # filled, then served until the gate has seen enough
            self.hits()
            self.cache.flush()

    @staticmethod
    def _measured(step: Any) -> Any:
        return lambda *args: (step(*args), None)[1]

    def hits(self) -> float:
        """Train a stretch of hits."""
        return self.train(self.model, iter(self.loader))

    def read_already(self) -> Any:
        """Return a pass whose batches have all been read."""
        self.cache.api.ring_batches, before = BATCHES, self.cache.api.ring_batches
        batches: Any = iter(self.loader)
        self.cache.api.ring_batches = before
        batches._planner.top_up()
        for entry in [planned.entry for planned in batches._planner.planned]:
            assert entry is None or entry.ready()
        return batches

    def from_memory(self) -> float:
        """Train the same on the oracle."""
        return self.train(lambda h: self.oracle.suffix(h, STOP), iter(self.memory), self.oracle)

    def train(
        self,
        run: Callable[[Any], Tensor],
        batches: Iterator[Any],
        model: Any = None,
        after: Callable[[], None] = lambda: None,
    ) -> float:
        """Train a stretch; return the median of its steps' seconds."""
        optimizer = self._optimizers[id(model or run)]
        clock = [time.perf_counter()]
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(run(x), y).backward()
            optimizer.step()
            after()
            clock.append(time.perf_counter())
        return statistics.median(end - start for start, end in itertools.pairwise(clock))

    @staticmethod
    def _optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def measure(task: Task, rounds: int) -> dict[str, float]:
    """Return milliseconds of a step and ratios to the oracle's."""
    steps: dict[str, list[float]] = defaultdict(list)

    def noting(name: str, stretch: Callable[[], float]) -> Callable[[], None]:
        return lambda: steps[name].append(stretch())

    def prepared() -> Iterator[Any]:
        for _ in range(WARM_UP + rounds):
            uses: dict[str, Callable[[], float]] = {
                "hits": task.hits,
                "oracle": task.from_memory,
                "read already": partial(task.train, task.model, task.read_already()),
            }
            yield {name: noting(name, use) for name, use in uses.items()}

    turns = in_turns(prepared(), warm_up=WARM_UP)
    found = {"oracle_ms": statistics.median(steps["oracle"]) * 1e3}
    for name, key in (("hits", "hit"), ("read already", "read_already")):
        pairs = list(zip(steps[name], steps["oracle"], strict=True))[WARM_UP:]
        found[f"{key}_vs_oracle"] = statistics.median(a / b for a, b in pairs)
        found[f"{key}_us"] = statistics.median(a - b for a, b in pairs) * 1e6
        found[f"{key}_stretch_vs_oracle"] = turns.wall.ratio(name, "oracle")
        found[f"{key}_work_vs_oracle"] = turns.work.ratio(name, "oracle")
    return found


class Timers:
    """Time that each named part spends itself on the thread that made this."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self.steps: list[dict[str, int]] = []
        self._thread, self._inside = threading.get_ident(), [0]

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a timer around it."""
        inside, spent, clock = self._inside, self.spent, time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            inside.append(0)
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock() - started
                spent[name] += took - inside.pop()
                inside[-1] += took

        return timed

    def step(self) -> None:
        """A step has ended."""
        self.steps.append(dict(self.spent))
        self.spent.clear()

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Put the timers around all parts while the block runs."""
        before = [(owner, key, vars(owner)[key]) for _, owner, key in NAMED]
        try:
            for (name, owner, key), (_, _, own) in zip(NAMED, before, strict=True):
                is_bound = isinstance(own, classmethod)
                timed = self.around(name, own.__func__ if is_bound else own)
                setattr(owner, key, classmethod(timed) if is_bound else timed)
            yield
        finally:
            for owner, key, own in before:
                setattr(owner, key, own)


def parts(task: Task, rounds: int) -> dict[str, float]:
    """Return microseconds of a step, by part: the median of the steps that have it, as far as it is
    in all of them. Half of the steps are the oracle's.
    """
    engine, steps = task.engine, list[dict[str, int]]()
    for _ in range(rounds):
        timers = Timers()
        own, engine._forward = engine._forward, timers.around(MODEL, engine._forward)
        with timers.everywhere():
            task.train(task.model, iter(task.loader), after=timers.step)
        engine._forward = own
        steps += timers.steps
        timers = Timers()
        suffix = timers.around(ORACLE, lambda h: task.oracle.suffix(h, STOP))
        task.train(suffix, iter(task.memory), task.oracle, timers.step)
        steps += timers.steps
    names = dict.fromkeys(itertools.chain.from_iterable(steps))
    found = {
        name: statistics.median(took) * min(1.0, 2 * len(took) / len(steps))
        for name in names
        if (took := [step[name] for step in steps if name in step])
    }
    found[MODEL] -= found.pop(ORACLE)
    found.pop(AUDITS, None)
    return {name: spent / 1e3 for name, spent in found.items()}


def measured(batch_size: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one size of batch."""
    with tempfile.TemporaryDirectory() as text:
        task = Task(Path(text), batch_size)
        with task.cache:
            found = {name: round(value, 3) for name, value in measure(task, rounds).items()}
            spent = parts(task, max(2, rounds // 4))
            stats = task.cache.stats()
    assert stats.hit_batches > stats.miss_batches
    by_size = sorted(spent.items(), key=lambda item: -item[1])
    return {
        "batch_size": batch_size,
        **found,
        "us_by_part": {name: round(us, 1) for name, us in by_size},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print."""
    options_of = parser(__doc__)
    options_of.add_argument("--batch-size", type=int, action="append", help="repeatable")
    options_of.add_argument("--rounds", type=int, default=12)
    options_of.add_argument("--threads", type=int, default=1)
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    rounds = 3 if options.quick else options.rounds
    steps = [measured(size, rounds) for size in options.batch_size or SIZES]
    report = {"environment": environment(), "rounds": rounds, "steps": steps}
    publish("small_step", report, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
