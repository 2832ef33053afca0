"""`python -m egeria_cache`: versions, and what is at hand here; for bug reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import psutil
import torch

from egeria_cache.device import default_device, device_name
from egeria_cache.store import kernel
from egeria_cache.tables import end_with_reader
from egeria_cache.version import __version__

NEEDED = ("torch", "numpy", "lmdb", "zstandard", "xxhash", "psutil")
OPTIONAL = (
    "rich", "matplotlib", "albumentations", "accelerate", "transformers", "lightning", "peft",
    "torchdata",
)  # fmt: skip


def main() -> int:
    """Print everything; return 0."""
    installed = "" if _version("egeria") else ", run from its sources"
    print(f"egeria {__version__}{installed}")
    print(f"Python {platform.python_version()} ({platform.platform()})")
    memory = psutil.virtual_memory().total / 1e9
    print(f"{os.cpu_count()} CPUs, {memory:.1f} GB of memory, {torch.get_num_threads()} threads")
    device = default_device()
    print("no accelerator" if device.type == "cpu" else f"{device_name(device)} ({device})")
    print(f"reading: {'by the compiled kernel' if kernel() else 'in Python: no kernel here'}")
    for what, names in (("needed", NEEDED), ("optional", OPTIONAL)):
        print(f"{what}:")
        for name in names:
            print(f"  {name:<16}{_version(name) or 'not installed'}")
    return 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
