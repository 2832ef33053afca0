"""A simulated accelerator: `register()` makes it the device "egsim" of this process, for good.

It is compiled once and kept, by its source and PyTorch's version, under the user's cache directory.
Since a process has one such backend and never gives it back, tests on it have processes of their
own (`test_simulated.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

__all__ = ["NAME", "Counts", "compiler_missing", "counted", "counts", "register"]

NAME = os.environ.get("EGSIM_NAME", "egsim")
WITHOUT = os.environ.get("EGSIM_WITHOUT", "")
"""What the device is to lack: "streams", "events", "pinned", "waiting" as a whole, "module"."""
total_bytes = 1 << 40
"""Of memory, on each device; nothing but what it says of itself depends on it."""
SOURCE = Path(__file__).parent / "backend.cpp"


def compiler_missing() -> str | None:
    """Why the backend cannot be built; None if it can."""
    if shutil.which(os.environ.get("CXX", "g++")) is None or shutil.which("ninja") is None:
        return "no C++ compiler or no ninja: the simulated device is not built"
    return None


def _directory() -> Path:
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "egeria-tests" / f"simulated-{key}"


def build() -> None:
    """Compile what is not compiled yet, and load it."""
    from torch.utils.cpp_extension import load

    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "ours").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        # PyTorch's own lock is a file, which a build that was killed leaves behind for ever.
        (directory / "lock").unlink(missing_ok=True)
        load(
            "egeria_simulated", [str(SOURCE)], is_python_module=False,
            extra_cflags=["-O0", "-w", "-std=c++20"], build_directory=str(directory),
        )  # fmt: skip


def register() -> torch.device:
    """Make the backend this process's accelerator. May be called again."""
    if not hasattr(torch, NAME):
        build()
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def _module() -> types.ModuleType:
    """What `torch.egsim` has."""
    ops: Any = torch.ops.simulated
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.manual_seed = module.manual_seed_all = lambda seed: ops.seed(seed)
    module.device_count = lambda: 2
    module.current_device = lambda: ops.device()
    module.set_device = lambda device: ops.set_device(torch.device(NAME, device).index)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    if "module" in WITHOUT:
        return module
    module.get_device_name = lambda device=None: "a simulated device"

    def index(device: Any) -> int:
        where = torch.device(device) if not isinstance(device, int) else torch.device(NAME, device)
        return ops.device() if where.index is None else where.index

    module.mem_get_info = lambda device: (total_bytes - ops.memory(index(device))[0], total_bytes)
    module.memory_reserved = lambda device: ops.memory(index(device))[0]
    module.max_memory_allocated = lambda device: ops.memory(index(device))[1]
    module.get_rng_state = lambda device=NAME: ops.rng_state(index(device))
    module.get_rng_state_all = lambda: [ops.rng_state(i) for i in range(2)]
    module.set_rng_state = lambda state, device=NAME: ops.set_rng_state(index(device), state)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for i, state in enumerate(states):
            ops.set_rng_state(i, state)

    module.set_rng_state_all = set_rng_state_all
    return module


@dataclass
class Counts:
    """What has crossed, and what made the host wait."""

    waits: int = 0
    """Calls that waited for the device."""
    to_device: int = 0
    """Bytes."""
    to_host: int = 0
    pageable: int = 0
    """Copies to the device from memory that is not page-locked."""
    copies_to_device: int = 0
    copies_to_host: int = 0
    across: int = 0
    """Bytes from one device to another."""
    pinned: int = 0
    """Bytes that were page-locked: nothing else runs on a device meanwhile."""

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def counts(*, all_threads: bool = False) -> Counts:
    """Return the counts of this thread, or of all, since the process began."""
    ops: Any = torch.ops.simulated
    return Counts(*ops.counts(all_threads))


@contextlib.contextmanager
def counted(*, all_threads: bool = False) -> Iterator[Counts]:
    """Count inside the block; the yielded counts are filled in at its end."""
    found, before = Counts(), counts(all_threads=all_threads)
    yield found
    found.__dict__.update((counts(all_threads=all_threads) - before).__dict__)
