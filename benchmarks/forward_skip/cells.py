"""What is measured of one model at one boundary: see `measure`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.harness import Times, in_turns, seconds
from egeria_cache import ActivationCache, ActivationStore
from egeria_cache.prefetch import ACTIVATION

from .bench import NUM_BATCHES, Bench, Loop, opened
from .gate import gate, judged

__all__ = ["CODECS", "Bench", "measure"]

NUM_PAIRS = 3
"""Of the batches, how many are computed and stored beside a step that only computes."""
CODECS = ("raw", "zstd", "split+zstd", "bitmap+split", "auto")


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
    loop = Loop(bench, bench.task.optimizer(bench.model))
    with opened(bench, boundary, directory / "always", "always") as (cache, loader):
        steps = iter(loader)
        write = partial(loop.cached, cache, steps, flush=True)
        first_batch_s = seconds(write, bench.device)
        pairs = (
            {"frozen": partial(loop.frozen, number), "written": write}
            for number in range(1, 1 + NUM_PAIRS)
        )
        written = in_turns(pairs, device=bench.device).wall
        for _ in range(1 + NUM_PAIRS, NUM_BATCHES):
            write()
        filled = cache.stats()
        states = loop.states(stop)

        def step_of_each(number: int) -> dict[str, Callable[[], object]]:
            return {
                "full": partial(loop.plain, bench.full, bench.full_optimizer, number),
                "frozen": partial(loop.frozen, number),
                "hit": partial(loop.cached, cache, steps),
                "oracle": partial(loop.oracle, states, stop, number),
            }

        rounds = map(step_of_each, range(1 + bench.rounds))
        times, work = in_turns(rounds, warm_up=1, device=bench.device)
        stats = cache.stats()
        raw_bytes, codecs = compression(cache, loader, bench, directory)
    extra_s = max(0.0, written.difference("written", "frozen"))
    saving_s = times.difference("frozen", "hit")
    stored = filled.stored_bytes / max(1, filled.num_samples)
    input_bytes = sum(tensor.nbytes for tensor in bench.inputs(bench.samples[0]))
    decision = gate(bench, boundary, directory / "auto", loop)
    return {
        "boundary": boundary,
        "share": round(stop / len(bench.model.layers), 3),
        "frozen_parameters": round(frozen_part(bench.model), 3),
        "step_s": {name: round(times.median(name), 4) for name in times},
        "times_s": {name: [round(one, 4) for one in own] for name, own in times.items()},
        "work_s": {name: round(work.median(name), 4) for name in work},
        **ratios(times),
        "hit_vs_oracle_work": round(work.ratio("hit", "oracle"), 3),
        "all_hits": stats.hits == (1 + bench.rounds) * bench.shape.batch_size,
        "input_bytes": input_bytes,
        "raw_bytes": raw_bytes,
        "stored_bytes": round(stored),
        "stored_vs_input": round(stored / input_bytes, 2),
        "codecs": codecs,
        "data_set_bytes": round(stored * bench.task.num_samples),
        "first_batch_s": round(first_batch_s, 3),
        "write_extra_s": round(extra_s, 4),
        "break_even_epoch": round(1 + extra_s / saving_s, 2) if saving_s > 0 else None,
        "gate": judged(decision, boundary, times.ratio("hit", "frozen")),
    }


def ratios(times: Times) -> dict[str, float]:
    """Return the ratios that people ask for."""
    pairs = (
        ("frozen", "full"), ("hit", "full"), ("hit", "frozen"), ("oracle", "full"),
        ("hit", "oracle"),
    )  # fmt: skip
    return {f"{of}_vs_{to}": round(times.ratio(of, to), 3) for of, to in pairs}


def frozen_part(model: nn.Module) -> float:
    count = sum(p.numel() for p in model.parameters())
    return sum(p.numel() for p in model.parameters() if not p.requires_grad) / count


def compression(
    cache: ActivationCache, loader: Any, bench: Bench, directory: Path
) -> tuple[int, dict[str, dict[str, float]]]:
    """Store some captured activations with each codec; raw bytes a sample, and per codec."""
    view = cache.api.views.of(loader.source.key)[0]
    ids = list(range(min(16, len(bench.samples.rows))))
    read, _ = view.generation.get_batch(ids, variant=0)
    rows = {name: value for name, value in read.items() if name.startswith(ACTIVATION)}
    raw = sum(value.nbytes for value in rows.values()) // len(ids)
    result = {}
    for codec in CODECS:
        with contextlib.closing(ActivationStore(directory / codec, codec=codec)) as store:
            store.open_generation({"codec": codec}).put_batch(ids, rows)
            store.flush()
            size = store.stats().stored_bytes / len(ids)
        result[codec] = {"bytes": round(size), "ratio": round(raw / size, 3)}
    return raw, result
