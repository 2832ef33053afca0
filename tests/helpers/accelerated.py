"""A training loop with Accelerate, in one process or in several, with and without a cache."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache, EgeriaLoader
from tests.helpers.gloo import run_ranks


class Net(nn.Module):
    """A frozen front that draws nothing, and dropout behind it."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16))
        self.front.requires_grad_(False)
        self.head = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x):
        return self.head(self.front(x))


class Rows:
    """Rows that are the same whenever they are loaded, as dicts."""

    def __init__(self, size=42):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(size, 12, generator=generator)
        self.labels = torch.randint(3, (size,), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index], "y": self.labels[index], "i": index}


@dataclass
class Trained:
    losses: list = field(default_factory=list)
    gathered: list = field(default_factory=list)
    """Labels of one pass over the loader, as `gather_for_metrics` gives them."""
    weights: dict = field(default_factory=dict)
    hits: int = 0
    why_not: str | None = None
    state: dict = field(default_factory=dict)


def train(directory, *, epochs=3, batch_size=8, each=None, loader_kwargs=None, **kwargs):
    """Train; with a cache if there is a directory.

    Args:
        directory: Of the cache; None trains with a DataLoader.
        epochs: How many.
        batch_size: Of the loader, as the user writes it.
        each: Called with (accelerator, prepared objects) before the training.
        loader_kwargs: Of the loader.
        kwargs: Of the Accelerator.
    """
    for state in (AcceleratorState, GradientState, PartialState):
        if not torch.distributed.is_initialized() or state is not PartialState:
            state._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **kwargs)
    model, data = Net(), Rows()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    rank = accelerator.process_index
    cache = None
    if directory is not None:
        cache = ActivationCache(model, f"{directory}/{rank}", "front", gate="always")
    options = {"batch_size": batch_size, "shuffle": True} | (loader_kwargs or {})
    with cache or nullcontext():
        if cache is not None:
            loader = EgeriaLoader(data, cache=cache, reuse=None, **options)
        else:
            loader = DataLoader(data, **options)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        run = Trained()
        if each is not None:
            each(accelerator, model, optimizer, loader)
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            run.losses += one_epoch(accelerator, model, optimizer, loader)
        with torch.no_grad():
            for batch in loader:
                model(batch["x"])
                if accelerator.even_batches:
                    run.gathered += accelerator.gather_for_metrics(batch["y"]).tolist()
        if cache is not None:
            run.hits, run.why_not = cache.stats().hits, cache.stats().why_not
        run.weights = {
            k: v.clone() for k, v in accelerator.unwrap_model(model).state_dict().items()
        }
    return run


def one_epoch(accelerator, model, optimizer, loader):
    losses, cache = [], getattr(loader, "cache", None)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if cache is not None:
            cache.flush()
    return losses


def in_processes(work, num_processes, *args):
    """Run `work(*args)` in processes of one group; return what each returned."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(partial(_in_group, work), num_processes, Path(directory), *args)


def _in_group(work, rank, *args):
    os.environ.update(LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], ACCELERATE_USE_CPU="true")
    return work(*args)


def train_as(directory, configs):
    """Train with and without a cache under each configuration of loaders."""
    return [
        tuple(
            train(where, dataloader_config=DataLoaderConfiguration(**config))
            for where in (f"{directory}/{name}", None)
        )
        for name, config in configs.items()
    ]
