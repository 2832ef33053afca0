"""The example of a pipeline, small, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_example_equals_one_process() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "examples/pipeline.py", "--epochs", "4", "--samples", "192", "--schedule", "GPipe",
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout
    assert "frozen up to block1" in told
    assert "frozen up to None" in told
    assert "bytes moved" in told
    assert "by the plan a batch takes" in told
    assert "one process" in told
