"""The command line of `train.py`, as one frozen value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from egeria_cache.arguments import Gate
from egeria_core.config import EvaluatorKind

__all__ = ["Settings", "parse_arguments"]

TASKS = ("image-classification", "segmentation", "translation", "question-answering")
FREE = frozenset(
    {"data", "output", "cache_directory", "workers", "device", "save_every", "limit", "restart"}
)
"""What may differ between a run and its continuation: it changes no number of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One training run."""

    task: str
    data: Path
    output: Path
    cache_directory: Path | None
    """On each machine's own disk; None: in the output."""
    model: str
    """Name of one of the task's models; "" is its small one."""
    weights: Path | None
    epochs: int
    batch_size: int
    lr: float | None
    """None: the task's own."""
    seed: int
    size: int | None
    """Pixels or tokens of a row; None: the task's own."""
    languages: str | None
    workers: int
    device: str
    amp: bool
    cache: bool
    freeze: bool
    limit: str
    gate: Gate
    evaluator: EvaluatorKind
    evaluate_every: int | None
    window: int
    tolerance: float
    save_every: int
    restart: bool

    def identity(self) -> dict[str, Any]:
        """Return what a run that is resumed must share with the one that wrote the checkpoint."""
        return {k: v if v is None else str(v) for k, v in asdict(self).items() if k not in FREE}


def parse_arguments(description: str, argv: Sequence[str] | None) -> Settings:
    """Read the command line; prints a message and exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--task", required=True, choices=TASKS)
    add("--data", required=True, type=Path, metavar="PATH", help="folder of the data set's files")
    add("--output", type=Path, default=Path("runs/train"), help="checkpoint, log and cache go here")
    add(
        "--cache-directory",
        type=Path,
        metavar="PATH",
        help="on a local disk, shared by the processes of one machine; by default in the output",
    )
    add("--model", default="", help="'small' or a model of the paper, such as resnet50")
    add("--weights", type=Path, help="start from this state_dict, saved by torch.save")
    add("--epochs", type=_positive, default=10)
    add("--batch-size", type=_positive, default=32, help="of all processes together")
    add("--lr", type=float, help="learning rate; by default the task's own")
    add("--seed", type=int, default=0)
    add("--size", type=_positive, help="pixels or tokens of a row; by default the task's own")
    add("--languages", help="suffixes of the text files, source first: en-de")
    add("--workers", type=int, default=2, help="processes that load samples")
    add("--device", default="auto", help="auto, cpu, or an accelerator's name, with its number")
    add("--amp", action="store_true", help="autocast to bfloat16")
    add("--no-cache", dest="cache", action="store_false", help="compute every activation")
    add("--no-freeze", dest="freeze", action="store_false", help="plain training")
    add("--limit", default="100GB", help="most that the cache may take on disk")
    add("--gate", default="auto", choices=("auto", "always", "never"), help="when to skip")
    add("--evaluator", default="auto", choices=("auto", "process", "inline"),
        help="where plasticity is measured; inline repeats itself exactly")  # fmt: skip
    add("--evaluate-every", type=_positive, metavar="N", help="steps; by default the guideline's")
    add("--window", type=int, default=10, help="evaluations in a row that freeze a layer")
    add("--tolerance", type=float, default=0.2, help="slope that counts as converged")
    add("--save-every", type=_positive, default=200, metavar="N", help="steps between checkpoints")
    add("--restart", action="store_true", help="begin anew even if there is a checkpoint")
    options = vars(parser.parse_args(argv))
    names = {field.name for field in fields(Settings)}
    assert names == options.keys(), names ^ options.keys()
    return Settings(**options)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
