"""What a hit costs beside an oracle, and what the engine costs where it has nothing to skip.

    python -m benchmarks.skip [--rounds 40] [--threads 1] [--quick]

The oracle trains the active part alone, on activations already in memory: nothing can be faster.
Every figure is the median of paired steps, taken in turns in one run. Prints tables and writes
benchmarks/results/skip.json (not with --quick).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import environment, in_turns, parser, publish, seconds
from benchmarks.models import CifarResNet, Staged
from egeria_cache.skip import SkipEngine

from .memory import MemoryEntry, MemoryHost, make_batch
from .transformer import Transformer

WARM_UP = 3


def train_step(
    run: Callable[[], Tensor], y: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Return one step: forward, loss, backward, update."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run(), y).backward()
        optimizer.step()

    return step


def mean_s(use: Callable[[], object], count: int) -> float:
    """Return the mean of what is too short to be timed alone."""

    def many() -> None:
        for _ in range(count):
            use()

    return seconds(many) / count


def measure_hits(
    kind: Callable[[], Staged], x: Tensor, y: Tensor, stop: int, rounds: int
) -> dict[str, Any]:
    """A step of hits, of the oracle and of the frozen model without the cache."""
    torch.manual_seed(0)
    model = kind()
    model.freeze(stop)
    oracle, plain = copy.deepcopy(model), copy.deepcopy(model)
    host = MemoryHost()
    engine = SkipEngine(model, host)
    engine.attach()
    engine.set_boundary(model.layers[stop - 1])
    model(make_batch(x))
    assert engine.cut is not None
    rows = host.rows
    (stored,) = rows.values()
    cut = engine.cut
    active = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (model, oracle, plain)
    ]

    def hit() -> Tensor:
        result: Tensor = model(make_batch(x, MemoryEntry(cut, rows, len(x))))
        return result

    uses = {
        "hit": train_step(hit, y, active[0]),
        "oracle": train_step(lambda: oracle.suffix(stored, stop), y, active[1]),
        "plain": train_step(lambda: plain(x), y, active[2]),
    }
    times = in_turns(repeat(uses, WARM_UP + rounds), warm_up=WARM_UP).wall
    plan = engine._plans.all()[0]
    assert plan.guard is not None
    guard_s = mean_s(plan.guard.changed, 200)
    engine.detach()
    return {
        "model": type(model).__name__,
        "boundary": model.layers[stop - 1],
        "oracle_ms": round(times.median("oracle") * 1e3, 2),
        "hit_vs_oracle": round(times.ratio("hit", "oracle"), 3),
        "hit_vs_uncached": round(times.ratio("hit", "plain"), 3),
        "guards_us": round(guard_s * 1e6, 1),
        "guards_vs_step": round(guard_s / times.median("hit"), 4),
    }


def measure_idle(kind: Callable[[], Staged], x: Tensor, y: Tensor, rounds: int) -> dict[str, Any]:
    """A step with the engine attached and nothing frozen, beside the plain model."""
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    engine = SkipEngine(model, MemoryHost())
    engine.attach()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    tagged = make_batch(x)
    uses = {
        "idle": train_step(lambda: model(tagged), y, optimizers[0]),
        "plain": train_step(lambda: plain(x), y, optimizers[1]),
    }
    times = in_turns(repeat(uses, WARM_UP + rounds), warm_up=WARM_UP).wall
    original, engine._forward = engine._forward, lambda *args, **kwargs: None
    engine_s = mean_s(lambda: model.forward(tagged), 2000)
    engine._forward = original
    engine.detach()
    return {
        "model": type(model).__name__,
        "step_ms": round(times.median("plain") * 1e3, 2),
        "idle_vs_plain": round(times.ratio("idle", "plain"), 4),
        "engine_us": round(engine_s * 1e6, 1),
        "engine_vs_step": round(engine_s / times.median("plain"), 5),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int, default=40)
    options_of.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    rounds = 4 if options.quick else options.rounds
    images, tokens = torch.randn(64, 3, 32, 32), torch.randint(1000, (32, 64))
    y_images, y_tokens = torch.randint(10, (64,)), torch.randint(10, (32,))
    tasks = (
        (partial(CifarResNet, 3), images, y_images, (1, 3, 6, 8)),
        (Transformer, tokens, y_tokens, (1, 3, 5)),
    )
    hits = [measure_hits(kind, x, y, stop, rounds) for kind, x, y, stops in tasks for stop in stops]
    idle = [measure_idle(kind, x, y, rounds) for kind, x, y, _ in tasks]
    report = {"environment": environment(), "rounds": rounds, "hits": hits, "idle": idle}
    publish("skip", report, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
