"""`train.py` under the launchers of others: one job, the same losses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import train

from tests.helpers import published

ROOT = Path(train.__file__).parents[1]
FLAGS = (
    "--task image-classification --device cpu --workers 0 --batch-size 8 --epochs 8 --gate always "
    "--evaluator inline --evaluate-every 1 --window 2 --tolerance 5 --save-every 3"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("launched") / "data"
    published.cifar10(place)
    return place


def launched(command: list[str], cwd: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(ROOT)}
    environment["EGERIA_ROOT"] = str(ROOT)
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def torchrun(*more: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", "2", *more]  # fmt: skip


def arguments(data: Path, output: Path) -> list[str]:
    return [*FLAGS.split(), "--data", str(data), "--output", str(output)]


def log_of(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def losses(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    output = tmp_path_factory.mktemp("whole") / "run"
    launched(torchrun(str(ROOT / "examples" / "train.py"), *arguments(data, output)), data.parent)
    return [record.get("loss") for record in log_of(output)]


@pytest.mark.long
def test_torchx_runs_the_same_job_from_its_config(
    data: Path, losses: list[object], tmp_path: Path
) -> None:
    pytest.importorskip("torchx")
    shutil.copy(ROOT / ".torchxconfig", tmp_path)
    run = [sys.executable, "-m", "torchx.cli.main", "run", "--wait", "dist.ddp", "-j", "1x2"]
    script = ["--script", str(ROOT / "examples" / "train.py")]
    launched([*run, *script, "--", *arguments(data, tmp_path / "run")], tmp_path)
    assert [r.get("loss") for r in log_of(tmp_path / "run")] == pytest.approx(losses, abs=1e-5)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
def test_slurm_runs_the_same_job(data: Path, losses: list[object], tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "train.sbatch")
    launched(["sbatch", "--wait", script, *arguments(data, tmp_path / "run")], tmp_path)
    assert [r.get("loss") for r in log_of(tmp_path / "run")] == pytest.approx(losses, abs=1e-5)
