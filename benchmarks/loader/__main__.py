"""EgeriaLoader beside DataLoader, StatefulDataLoader, LitData and Grain; all in one run.

    python -m benchmarks.loader [--samples 768] [--rounds 7] [--json] [--quick]

Epochs are taken in turns, round by round, and a ratio is the median over the rounds of one
contestant's epoch to DataLoader's of the same round. `loading` is the loader alone; `training`
trains the last part of a small network behind a frozen prefix, which every contestant computes but
EgeriaLoader on a hit. Writes benchmarks/results/loader.json and loader.png (not with --quick). The
peers come with `pip install '.[bench]'`; one that is missing is named with the reason.
"""

from __future__ import annotations

import contextlib
import pickle
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Times, environment, in_turns, parser, publish, pyplot, seconds
from egeria_cache import ActivationCache, EgeriaLoader

from .large import measure_large
from .peers import CONTESTANTS, Cheap, Expensive, MissingPeerError, make
from .training import frozen_net, load, train

BASE = "DataLoader"
PARITY = (BASE, "EgeriaLoader, cache=None", "EgeriaLoader, nothing frozen")
"""What is to take the same time; measured again on their own, more often."""
HITS = "EgeriaLoader, hits"

Uses = dict[str, Callable[[], object]]


def against_base(times: Times) -> dict[str, Any]:
    """Return median seconds of each, and the median ratio to DataLoader's."""
    return {
        name: {
            "median_s": round(times.median(name), 4),
            "ratio": round(times.ratio(name, BASE), 3),
        }
        for name in times
    }


def taken(uses: Uses, rounds: int) -> Times:
    """Run all in turns."""
    return in_turns(repeat(uses, rounds)).wall


def measure_epochs(
    data: Any, directory: Path, rounds: int, skipped: dict[str, str]
) -> dict[str, Any]:
    """Return loading and training epochs, cold and of hits."""
    idle_model, idle_optimizer = frozen_net()
    loaders: dict[str, Any] = {}
    with ActivationCache(idle_model, directory / "idle") as idle:
        for name in CONTESTANTS:
            try:
                loaders[name] = make(name, data, directory / name, cache=idle)
                load(loaders[name])  # its first epoch warms up
            except MissingPeerError as reason:
                loaders.pop(name, None)
                skipped[name] = str(reason)
        load_uses: Uses = {name: partial(load, one) for name, one in loaders.items()}
        loading = taken(load_uses, rounds)
        states = {n: state_cost(one) for n, one in loaders.items() if hasattr(one, "state_dict")}
        train_uses: Uses = {}
        for name, loader in loaders.items():
            model, optimizer = frozen_net()
            if name.endswith("nothing frozen"):  # the model that this cache is attached to
                model, optimizer = idle_model, idle_optimizer
            train_uses[name] = partial(train, loader, model, optimizer)
        parity = {
            "loading": against_base(taken({n: load_uses[n] for n in PARITY}, 4 * rounds)),
            "training": against_base(taken({n: train_uses[n] for n in PARITY}, 3 * rounds)),
        }
        # `auto` would rightly switch itself off where it does not pay; here it is to be seen.
        with trained(data, directory / "hits") as (cache, epoch):
            colds = [seconds(epoch)]
            cache.flush()
            first_hit = seconds(epoch)
            training = taken(train_uses | {HITS: epoch}, rounds)
            hit_rate = cache.stats().hit_rate
        for number in range(2):
            with trained(data, directory / f"cold{number}") as (_, epoch):
                colds.append(seconds(epoch))
    result = {"loading": against_base(loading), "training": against_base(training)}
    cold = statistics.median(colds)
    result["training"]["EgeriaLoader, cold"] = {
        "median_s": round(cold, 4), "ratio": round(cold / training.median(BASE), 3)
    }  # fmt: skip
    return result | {
        "sample_us": round(loading.median(BASE) / len(data) * 1e6, 1),
        "first_hit_epoch_s": round(first_hit, 4),
        "hit_rate": round(hit_rate, 3),
        "state_dict": states,
        "parity": parity,
    }


@contextlib.contextmanager
def trained(data: Any, directory: Path) -> Iterator[tuple[ActivationCache, Callable[[], object]]]:
    """Give an empty cache, and what trains an epoch with it."""
    model, optimizer = frozen_net()
    with ActivationCache(model, directory, "front", gate="always") as cache:
        loader = EgeriaLoader(data, 64, shuffle=True, cache=cache, seed=0)
        yield cache, partial(train, loader, model, optimizer)


def state_cost(loader: Any) -> dict[str, float]:
    """Median microseconds and pickled bytes of `state_dict` in mid-epoch."""
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    median_s = taken({"state_dict": loader.state_dict}, 20).median("state_dict")
    return {"us": round(median_s * 1e6, 1), "bytes": len(pickle.dumps(loader.state_dict()))}


def first_batch(data: Any, directory: Path, workers: int, rounds: int) -> dict[str, float]:
    """Median seconds from making the loader to its first batch; its end is not counted."""
    model, _ = frozen_net()
    with ActivationCache(model, directory / "first") as cache:

        def begin(name: str) -> object:
            iterator = iter(make(name, data, directory, workers=workers, cache=cache))
            next(iterator)
            return iterator

        uses: Uses = {}
        for name in CONTESTANTS:
            if name not in ("LitData", "Grain"):
                with contextlib.suppress(MissingPeerError):
                    make(name, data, directory, cache=cache)
                    uses[name] = partial(begin, name)
        times = taken(uses, rounds)
    return {name: round(times.median(name), 4) for name in times}


def plot(report: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot().subplots(2, 2, figsize=(11, 6), sharex="col")
    for row, kind in enumerate(("cheap", "expensive")):
        for column, what in enumerate(("loading", "training")):
            rows = report[kind][what]
            axis = axes[row][column]
            ratios = [report[kind]["parity"][what].get(name, rows[name])["ratio"] for name in rows]
            colours = ["tab:green" if "Egeria" in name else "tab:grey" for name in rows]
            bars = axis.barh(list(rows), ratios, color=colours)
            axis.bar_label(bars, padding=3, fontsize=8)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            if what == "loading":
                axis.set_xscale("log")
                axis.set_xlim(0.5, 250)
            axis.set_title(f"{what} epoch, {kind} data set", fontsize=10)
            axis.tick_params(labelsize=8)
    axes[1][0].set_xlabel("time / DataLoader's (less is better)")
    axes[1][1].set_xlabel("time / DataLoader's (less is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options_of = parser(__doc__)
    options_of.add_argument("--samples", type=int, default=768)
    options_of.add_argument("--rounds", type=int, default=7)
    options_of.add_argument("--large", type=int, default=10_000_000, help="of the large run")
    options = options_of.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.quick:
        options.samples, options.rounds, options.large = 256, 3, 1_000_000
    skipped: dict[str, str] = {}
    report: dict[str, Any] = {"environment": environment(), "samples": options.samples,
                              "rounds": options.rounds}  # fmt: skip
    with tempfile.TemporaryDirectory() as text:
        kinds: dict[str, Any] = {"cheap": Cheap(4 * options.samples),
                                 "expensive": Expensive(options.samples)}  # fmt: skip
        # Before Grain starts its threads: they do not survive the fork of DataLoader's workers.
        report["first_batch_s"] = {
            f"{workers} workers": first_batch(
                kinds["expensive"], Path(text) / str(workers), workers, options.rounds
            )
            for workers in (0, 2)
        }
        for kind, data in kinds.items():
            report[kind] = measure_epochs(data, Path(text) / kind, options.rounds, skipped)
    report["large"] = measure_large(options.large, skipped)
    report["skipped"] = skipped
    publish("loader", report, options, plot=plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
