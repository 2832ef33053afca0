from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from egeria_cache.store import reader
from egeria_cache.store.codecs import SWITCH, Kernel, kernel
from egeria_cache.store.disk.files import DATA_NAME
from egeria_cache.store.generation import encode_keys
from tests.helpers.stored import ActivationStore

DEADLINE_S = 60
USUAL = """
import gc, os, resource, sys, torch
from tests.helpers.stored import ActivationStore
torch.set_num_threads(1)
"""


@pytest.fixture
def store(directory: Path) -> Iterator[ActivationStore]:
    with ActivationStore(directory, limit="1GB") as opened:
        yield opened


@pytest.fixture(autouse=True, params=["", pytest.param("python", marks=pytest.mark.long)])
def way_to_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test with the kernel, and in the long mode without it, too; all batches are large,
    and no core is busy.
    """
    monkeypatch.setattr(reader, "LARGE_BYTES", 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    if request.param:
        monkeypatch.setenv(SWITCH, "0")
        kernel.cache_clear()
    codecs = [one for one in request.node.callspec.params.values() if isinstance(one, str)]
    if kernel() is None and any("split" in one for one in codecs):
        pytest.skip("split records are read by the kernel alone")
    yield
    kernel.cache_clear()


@pytest.fixture
def compiled(way_to_read: None) -> Kernel:
    """The kernel; without one the test is skipped."""
    found = kernel()
    if found is None:
        pytest.skip("no kernel here, or left aside")
    return found


def entries_of(store: ActivationStore, ids: list[Any]) -> Any:
    """Where the records of some samples lie in the store's own generation."""
    with store._own()._files.reading() as view:
        return view.located(encode_keys(ids))


def damage(store: ActivationStore, ids: list[Any], at: int = 60) -> None:
    """Flip a bit of these records, behind the back of whoever has them open."""
    generation = store._own()
    path = store.directory / generation.name / DATA_NAME
    with path.open("r+b") as file:
        for place in entries_of(store, ids)["place"].tolist():
            assert place
            (byte,) = os.pread(file.fileno(), 1, place + at)
            os.pwrite(file.fileno(), bytes([byte ^ 16]), place + at)


def counted(generation: Any) -> tuple[int, int]:
    """Rows written and dropped."""
    return generation._writer.numbers["writes"], generation._writer.numbers["dropped_writes"]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of, or worse."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def run_python(code: str, *argv: object, **options: Any) -> subprocess.Popen[str]:
    """Start a process of its own, which knows what most need."""
    return subprocess.Popen(
        [sys.executable, "-c", USUAL + textwrap.dedent(code), *map(str, argv)],
        stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def run_to_its_end(code: str, *argv: object, count: int = 1) -> str:
    """Run a process, or several that are told their numbers besides, which must end well."""
    children = [run_python(code, *argv, number, stderr=subprocess.PIPE) for number in range(count)]
    ends = [(*child.communicate(timeout=300), child.returncode) for child in children]
    assert all(status == 0 for _, _, status in ends), ends
    return ends[0][0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def keep(store: ActivationStore, *batch: Any, into: Any = None, **options: Any) -> bool:
    """Hand a batch to a store, or into a generation of it, and wait until it is on disk."""
    taken: bool = (into or store).put_batch(*batch, **options)
    assert store.flush(60)
    return taken


def random_rows(ids: Any, width: int) -> Tensor:
    """One row a sample, the same whenever it is asked for."""
    seeds = [torch.Generator().manual_seed(int(one)) for one in ids]
    return torch.stack([torch.randn(width, generator=one) for one in seeds])
