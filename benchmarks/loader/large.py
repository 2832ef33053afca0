"""Ten million samples: what beginning an epoch takes, in a process of its own for each loader.

python -m benchmarks.loader.large CONTESTANT NUM_SAMPLES
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.harness import seconds
from egeria_cache import EgeriaLoader

from .peers import CONTESTANTS, make
from .training import load

__all__ = ["measure_large"]

ROOT = Path(__file__).parents[2]
PROBED = ("DataLoader", "StatefulDataLoader", "Grain", "EgeriaLoader, cache=None",
          "EgeriaLoader, seeded")  # fmt: skip


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
    iterators: list[Any] = []

    def start() -> None:
        iterators.append(iter(loader))
        next(iterators[0])

    start_s = seconds(start)
    for _ in range(9):
        next(iterators[0])
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
        command = [sys.executable, "-m", "benchmarks.loader.large", name, str(num_samples)]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            skipped[f"{name} at {num_samples} samples"] = done.stderr.strip().splitlines()[-1]
        else:
            results[name] = json.loads(done.stdout.splitlines()[-1])
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(probe(sys.argv[1], int(sys.argv[2]))))
