"""Train one of the paper's four tasks on your own files, with Egeria; goes on after a kill.

    python examples/train.py --task image-classification --data CIFAR_OR_IMAGE_FOLDER
    python examples/train.py --task segmentation         --data VOCdevkit/VOC2012
    python examples/train.py --task translation          --data FOLDER --languages en-de
    python examples/train.py --task question-answering   --data FOLDER_OF_SQUAD_JSON

The same command again goes on where the last run stopped, in the middle of an epoch if need be.
On several processes and machines it is started by torchrun, torchx or sbatch: docs/cluster.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from data import DataError
from rich.console import Console
from tasks import Task, TaskError, make_task
from torch import nn
from training import (
    Checkpoint,
    CheckpointError,
    Ranks,
    RunLog,
    Settings,
    joined,
    parse_arguments,
)
from training.progress import Progress

from egeria_cache import ActivationCache, EgeriaError, EgeriaLoader, ShardAffineSampler
from egeria_cache.device import default_device, runs_late
from egeria_core import FreezeController


def train(settings: Settings, task: Task, console: Console, ranks: Ranks) -> None:
    """An ordinary training loop; Egeria's part is marked by a plus."""
    device = ranks.device(torch.device(pick_device(settings.device)))
    torch.manual_seed(settings.seed)
    model = task.model().to(device)
    parallel = ranks.wrap(model)
    optimizer = task.optimizer(model, settings.lr or task.lr)
    with ExitStack() as stack:
        cache = controller = None
        if settings.cache and settings.freeze:
            cache = stack.enter_context(  # +
                ActivationCache(
                    parallel,
                    settings.cache_directory or settings.output / "cache",
                    limit=settings.limit,
                    gate=settings.gate,
                )
            )
        loader, test_loader = make_loaders(settings, task, device, cache, ranks)
        total = settings.epochs * len(loader)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(task.rate, total=total))
        if settings.freeze:
            controller = stack.enter_context(  # +
                FreezeController(
                    parallel,
                    optimizer,
                    cache,
                    policy="plasticity",
                    total_steps=total,
                    evaluate_every=settings.evaluate_every,
                    window=settings.window,
                    tolerance=settings.tolerance,
                    evaluator=settings.evaluator,
                    unfreeze_rule=task.unfreeze_rule,
                )
            )
        parts: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "test_loader": test_loader,
            "controller": controller,
        }
        checkpoint = Checkpoint(
            settings.output / "checkpoint.pt",
            settings.identity(),
            {name: part for name, part in parts.items() if part is not None},
            {"loader": loader},
            ranks,
        )
        name = "log.jsonl" if ranks.is_first else f"log.{ranks.rank}.jsonl"
        log = stack.enter_context(closing(RunLog(settings.output / name)))
        at = (None if settings.restart else checkpoint.load()) or {"epoch": 0, "step": 0, "log": 0}
        log.cut(at["log"])
        step = at["step"]
        progress = stack.enter_context(Progress(console, total, step, model, cache))
        for epoch in range(at["epoch"], settings.epochs):
            if isinstance(loader.sampler, ShardAffineSampler):
                loader.sampler.set_epoch(epoch)
            model.train()
            start = time.perf_counter()
            for batch in loader:
                with torch.autocast(device.type, torch.bfloat16, enabled=settings.amp):
                    loss = task.loss(parallel, to_device(batch, device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                if controller is not None:
                    controller.step(loss)  # +
                step += 1
                loss = ranks.mean(loss)
                log.add_loss(step, loss)
                progress.step(epoch, loss)
                if step % settings.save_every == 0:
                    checkpoint.save(epoch=epoch, step=step, log=log.position())
            seconds = time.perf_counter() - start
            score = test(task, model, test_loader, device) if ranks.is_first else None
            ranks.wait()
            log.add(**progress.epoch(epoch, task.metric, score, seconds))
            checkpoint.save(epoch=epoch + 1, step=step, log=log.position())
        if cache is not None:
            cache.flush()
            console.print(cache.report(), highlight=False)


def make_loaders(
    settings: Settings,
    task: Task,
    device: torch.device,
    cache: ActivationCache | None,
    ranks: Ranks,
) -> tuple[EgeriaLoader[Any], EgeriaLoader[Any] | None]:
    """Return the loaders of the training and of the test part."""
    common: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "num_workers": settings.workers,
        "pin_memory": runs_late(device),
        "cache": cache,
        "seed": settings.seed,
    }
    mine = common
    if ranks.world == 1:
        mine = {**common, "shuffle": True}
    else:
        if settings.batch_size % ranks.world:
            raise TaskError(
                f"--batch-size {settings.batch_size} cannot be shared by {ranks.world} processes; "
                "give a multiple"
            )
        sampler = ShardAffineSampler(
            task.train_set, ranks.world, ranks.rank, seed=settings.seed,
            ranks_per_node=ranks.per_node,
        )  # fmt: skip
        size = settings.batch_size // ranks.world
        mine = {**common, "sampler": sampler, "batch_size": size}
    loader: EgeriaLoader[Any] = EgeriaLoader(task.train_set, **mine)  # +
    if task.test_set is None:
        return loader, None
    return loader, EgeriaLoader(task.test_set, name="test", **common)


@torch.no_grad()
def test(task: Task, model: nn.Module, loader: Any, device: torch.device) -> float | None:
    """Return the task's metric on the test part; None if it has none."""
    if loader is None:
        return None
    model.eval()
    # A loader draws from the global generator, and a resumed one puts it back to where it was: the
    # training must not notice either.
    with torch.random.fork_rng(devices=[]):
        batches: Iterator[Any] = (to_device(batch, device) for batch in loader)
        return task.score(model, batches)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch."""
    if isinstance(batch, dict):
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
    return [value.to(device, non_blocking=True) for value in batch]


def pick_device(name: str) -> str:
    """Return a device's name, for "auto" the accelerator if there is one."""
    if name == "auto":
        return str(default_device())
    return name


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 when the run is complete, 2 on bad input, 130 when interrupted."""
    settings = parse_arguments(__doc__ or "", argv)
    console = Console()
    try:
        with joined() as ranks:
            console.quiet = not ranks.is_first
            train(settings, make_task(settings), console, ranks)
    except (DataError, TaskError, CheckpointError, EgeriaError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {settings.output}")
        return 130
    console.print(f"done: {settings.output / 'log.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
