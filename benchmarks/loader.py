"""EgeriaLoader beside DataLoader, StatefulDataLoader, LitData and Grain; all in one run.

    python benchmarks/loader.py [--samples 768] [--rounds 7] [--json] [--quick]

Epochs are taken in turns, round by round, and a ratio is the median over the rounds of one
contestant's epoch to DataLoader's of the same round, so that a busy machine disturbs all alike.
`loading` is the loader alone; `training` trains the last part of a small network behind a frozen
prefix, which every contestant computes but EgeriaLoader on a hit. Writes
benchmarks/results/loader.json and loader.png (not with --quick). The peers come with
`pip install egeria[bench]`; one that is missing is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))
from bench_environment import environment
from loader_peers import CONTESTANTS, Cheap, Expensive, MissingPeerError, make

from egeria_cache import ActivationCache, EgeriaLoader

RESULTS = Path(__file__).parent / "results"
PROBED = ("DataLoader", "StatefulDataLoader", "Grain", "EgeriaLoader, cache=None",
          "EgeriaLoader, seeded")  # fmt: skip
PARITY = ("DataLoader", "EgeriaLoader, cache=None", "EgeriaLoader, nothing frozen")
"""What is to take the same time; measured again on their own, more often."""
HITS = "EgeriaLoader, hits"


class Net(nn.Module):
    """Eight convolutions and a head; the first six are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(*map(_conv, (3, *[32] * 5), [32] * 6, (2, 1, 1, 1, 1, 2)))
        self.back = nn.Sequential(_conv(32, 32, 1), _conv(32, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to logits (B, 10)."""
        logits: Tensor = self.head(self.back(self.front(x)).mean((2, 3)))
        return logits


def _conv(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1), nn.ReLU())


def frozen_net() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    model.front.requires_grad_(False)
    active = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(active, lr=0.01)


def load(loader: Any) -> None:
    for _ in loader:
        pass


def train(loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for images, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()


def seconds(use: Callable[[], object]) -> float:
    started = time.perf_counter()
    use()
    return time.perf_counter() - started


def paired(uses: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run all in turns, back and forth; return each one's seconds by round."""
    times: dict[str, list[float]] = {name: [] for name in uses}
    for round_ in range(rounds):
        for name in list(uses) if round_ % 2 else list(uses)[::-1]:
            times[name].append(seconds(uses[name]))
    return times


def against(times: dict[str, list[float]], base: str = "DataLoader") -> dict[str, Any]:
    """Median seconds of each, and the median over the rounds of its ratio to `base`."""
    return {
        name: {
            "median_s": round(statistics.median(own), 4),
            "ratio": round(
                statistics.median(a / b for a, b in zip(own, times[base], strict=True)), 3
            ),
        }
        for name, own in times.items()
    }


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
        loading = paired({n: partial(load, one) for n, one in loaders.items()}, rounds)
        states = {n: state_cost(one) for n, one in loaders.items() if hasattr(one, "state_dict")}
        train_uses: dict[str, Callable[[], object]] = {}
        for name, loader in loaders.items():
            model, optimizer = frozen_net()
            if name.endswith("nothing frozen"):  # the model that this cache is attached to
                model, optimizer = idle_model, idle_optimizer
            train_uses[name] = partial(train, loader, model, optimizer)
        near = [n for n in train_uses if n in PARITY]
        parity = {
            "loading": against(paired({n: partial(load, loaders[n]) for n in near}, 4 * rounds)),
            "training": against(paired({n: train_uses[n] for n in near}, 3 * rounds)),
        }
        model, optimizer = frozen_net()
        # `auto` would rightly switch itself off where it does not pay; here it is to be seen.
        with ActivationCache(model, directory / "hits", "front", gate="always") as cache:
            loader = EgeriaLoader(data, 64, shuffle=True, cache=cache, seed=0)
            colds = [seconds(lambda: train(loader, model, optimizer))]
            cache.flush()
            first_hit = seconds(lambda: train(loader, model, optimizer))
            train_uses[HITS] = lambda: train(loader, model, optimizer)
            training = paired(train_uses, rounds)
            stats = cache.stats()
        for number in range(2):
            model, optimizer = frozen_net()
            with ActivationCache(
                model, directory / f"cold{number}", "front", gate="always"
            ) as cache:
                loader = EgeriaLoader(data, 64, shuffle=True, cache=cache, seed=0)
                colds.append(seconds(partial(train, loader, model, optimizer)))
    result = {"loading": against(loading), "training": against(training)}
    base = statistics.median(training["DataLoader"])
    cold = statistics.median(colds)
    result["training"]["EgeriaLoader, cold"] = {
        "median_s": round(cold, 4), "ratio": round(cold / base, 3)
    }  # fmt: skip
    return result | {
        "sample_us": round(statistics.median(loading["DataLoader"]) / len(data) * 1e6, 1),
        "first_hit_epoch_s": round(first_hit, 4),
        "hit_rate": round(stats.hit_rate, 3),
        "state_dict": states,
        "parity": parity,
    }


def state_cost(loader: Any) -> dict[str, float]:
    """Median microseconds and pickled bytes of `state_dict` in mid-epoch."""
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    times = [seconds(loader.state_dict) for _ in range(20)]
    size = len(pickle.dumps(loader.state_dict()))
    return {"us": round(statistics.median(times) * 1e6, 1), "bytes": size}


def first_batch(data: Any, directory: Path, workers: int, rounds: int) -> dict[str, float]:
    """Median seconds from making the loader to its first batch; its end is not counted."""
    model, _ = frozen_net()
    with ActivationCache(model, directory / "first") as cache:
        names = [n for n in CONTESTANTS if n not in ("LitData", "Grain")]
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                started = time.perf_counter()
                iterator = iter(make(name, data, directory, workers=workers, cache=cache))
                next(iterator)
                times[name].append(time.perf_counter() - started)
                del iterator
    return {name: round(statistics.median(own), 4) for name, own in times.items()}


# -- ten million samples, in a process of their own --------------------------------------------


class Numbers(Dataset[tuple[Tensor, int]]):
    """As many samples as one likes, that cost no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), index


def probe(name: str, num_samples: int) -> dict[str, Any]:
    """Begin an epoch and take a state: time, and memory at the peak, of this process."""
    if name == "EgeriaLoader, seeded":
        loader: Any = EgeriaLoader(Numbers(num_samples), 64, shuffle=True, seed=0)
    else:
        loader = make(name, Numbers(num_samples), Path())
    load(make(name, Numbers(64), Path()) if name in CONTESTANTS else EgeriaLoader(Numbers(64)))
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    started = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    start_s = time.perf_counter() - started
    for _ in range(9):
        next(iterator)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    result = {"start_s": round(start_s, 3),
              "bytes_per_sample": round(max(0, peak - before) / num_samples, 1)}  # fmt: skip
    if hasattr(loader, "state_dict"):
        result["state_us"] = round(seconds(loader.state_dict) * 1e6, 1)
        result["state_bytes"] = len(pickle.dumps(loader.state_dict()))
    return result


def measure_large(num_samples: int, skipped: dict[str, str]) -> dict[str, Any]:
    """Run `probe` for each contestant in a process of its own."""
    results = {}
    for name in PROBED:
        command = [sys.executable, __file__, "--probe", name, "--samples",
                   str(num_samples)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            skipped[f"{name} at {num_samples} samples"] = done.stderr.strip().splitlines()[-1]
        else:
            results[name] = json.loads(done.stdout.splitlines()[-1])
    return results


# -- out ---------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    console = Console(width=110)
    for kind in ("cheap", "expensive"):
        part = report[kind]
        table = Table(title=f"{kind} data set, {part['sample_us']} us a sample; DataLoader = 1")
        for title in ("", "loading", "s", "training", "s", "state_dict us", "bytes"):
            table.add_column(title, justify="left" if not title else "right")
        for name in part["training"]:
            loading, state = part["loading"].get(name, {}), part["state_dict"].get(name, {})
            training = part["training"][name]
            cells = [loading.get("ratio"), loading.get("median_s"), training["ratio"],
                     training["median_s"], state.get("us"), state.get("bytes")]  # fmt: skip
            table.add_row(name, *("" if cell is None else str(cell) for cell in cells))
        console.print(table)
        for what, rows in part["parity"].items():
            near = ", ".join(f"{name}: {row['ratio']}" for name, row in rows.items())
            console.print(f"{what}, more rounds: {near}")
    for title in ("first_batch_s", "large"):
        table = Table(title=title)
        rows = report[title]
        columns = list(dict.fromkeys(key for row in rows.values() for key in row))
        for column in ("", *columns):
            table.add_column(column, justify="right" if column else "left")
        for name, row in rows.items():
            table.add_row(name, *(str(row.get(column, "")) for column in columns))
        console.print(table)
    for name, reason in report["skipped"].items():
        console.print(f"skipped: {name}: {reason}")


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6), sharex="col")
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", type=int, default=10_000_000, help="samples of the large run")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--quick", action="store_true", help="smaller, and write no results")
    parser.add_argument("--probe", choices=PROBED, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.probe:
        print(json.dumps(probe(options.probe, options.samples)))
        return 0
    if options.quick:
        options.samples, options.rounds, options.large = 256, 3, 1_000_000
    skipped: dict[str, str] = {}
    report: dict[str, Any] = {"environment": environment(), "samples": options.samples,
                              "rounds": options.rounds,
                              "load_average": os.getloadavg()[0]}  # fmt: skip
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
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "loader.json").write_text(json.dumps(report, indent=2) + "\n")
        plot(report, RESULTS / "loader.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
