"""The tests on the simulated device, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import backend

HERE = Path(__file__).parent / "simulated"
ROOT = HERE.parents[2]
GROUPS = {
    "chain": ("chain", "counts"),
    "features": ("features", "memory", "padded"),
    "others": ("controller", "ring"),
    "order": ("order",),
    "hostile": ("hostile",),
}
"""To begin a process costs as much as ten tests."""
TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)

if missing := backend.compiler_missing():
    pytest.skip(missing, allow_module_level=True)


def test_the_whole_chain_is_right_on_the_simulated_device() -> None:
    check("--cases", "1", *files("chain"))


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_all_checks_on_the_simulated_device_pass(group: str) -> None:
    check("-m", "long or not long", *files(group))


def test_no_check_is_left_out() -> None:
    named = {f"check_{name}.py" for group in GROUPS.values() for name in group}
    assert named == {path.name for path in HERE.glob("check_*.py")}


@pytest.mark.cases(1)
@pytest.mark.parametrize("lacks", ["streams", "pinned", "streams,pinned,events,waiting,module"])
def test_what_a_device_lacks_is_done_without(lacks: str) -> None:
    some = "layer1-0 or moves or room or audits"
    check(str(HERE / "check_chain.py"), "-k", some, EGSIM_WITHOUT=lacks, EGSIM_NAME="another")


def files(group: str) -> list[str]:
    return [str(HERE / f"check_{name}.py") for name in GROUPS[group]]


def check(*arguments: str, **variables: str) -> None:
    """Run tests in a process of their own."""
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q",
        "-o", "python_files=check_*.py", "--tb=short", *arguments,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
