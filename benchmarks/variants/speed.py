"""What a run of random samples takes where the front is three quarters of a step."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.models.resnet import CifarResNet, ResNet50
from benchmarks.models.staged import Staged
from benchmarks.variants.tasks import Augmented, photographs
from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.samples import DEFAULT_REUSE

__all__ = ["MODELS", "speed"]

BATCH_SIZE = 32
SHARE = 0.75
"""Of a plain step that the front's forward takes, as nearly as its layers allow."""
MODELS: dict[str, tuple[Callable[[], Staged], int, tuple[tuple[int, int], ...]]] = {
    "ResNet-32": (lambda: CifarResNet(5), 32, ((12, 384), (12, 1536), (24, 384), (48, 384))),
    "ResNet-50": (lambda: ResNet50(num_classes=10), 64, ((12, 384), (24, 384))),
}
"""Name -> how it is made, of how many pixels each way its images are; epochs and samples of its
runs."""


def speed(name: str, *, epochs: int, num_samples: int) -> dict[str, float]:
    """Train on crops of photographs by plain PyTorch, and with a cache, defaults all.

    Returns:
        The front's share of a plain step; means of processor milliseconds of a step by plain
        PyTorch, of one in a later epoch with a cache (where one computes new rows of several), and,
        in turns with these epochs, of one by hand that loads and computes its new rows alone, keeps
        them, and has the others in memory; and the ratio of whole runs.
    """
    make, side, _ = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), _crops(num_samples, side)
    stop, share = _front(model, data)
    model.freeze(stop)
    plain, cached = copy.deepcopy(model), copy.deepcopy(model)
    _optimizer(plain)  # the first one imports a compiler
    steps: dict[str, list[float]] = {"plain": [], "cache": [], "by_hand": []}
    began = time.process_time()
    for _ in range(epochs):
        steps["plain"] += _epoch(plain, _loader(data))
    plain_s = time.process_time() - began
    by_hand, cached_s = ByHand(model, data, stop), 0.0
    began = time.process_time()
    with (
        tempfile.TemporaryDirectory() as text,
        ActivationCache(cached, Path(text), cached.layers[stop - 1]) as cache,
    ):
        loader = EgeriaLoader(data, BATCH_SIZE, shuffle=True, drop_last=True, cache=cache)
        for epoch in range(epochs):
            times = _epoch(cached, loader)
            if epoch >= epochs // 2:
                cached_s += time.process_time() - began
                steps["cache"] += times
                steps["by_hand"] += by_hand.epoch()
                began = time.process_time()
    cached_s += time.process_time() - began
    found = {f"{key}_ms": 1e3 * statistics.mean(times) for key, times in steps.items()}
    return {
        "share": share,
        **found,
        "vs_by_hand": found["cache_ms"] / found["by_hand_ms"],
        "later_ratio": found["cache_ms"] / found["plain_ms"],
        "time_ratio": cached_s / plain_s,
        "batches": len(data) // BATCH_SIZE,
        "epochs": epochs,
    }


def _crops(num_samples: int, side: int) -> Augmented:
    """Random crops that are mirrored and changed in brightness, of parts of two photographs."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(num_samples):
        whole = photographs()[number % 2]
        top, left = (int(torch.randint(n - 2 * side, (), generator=generator))
                     for n in whole.shape[1:])  # fmt: skip
        samples.append(whole[:, top : top + 2 * side, left : left + 2 * side].contiguous())

    def augment(image: Tensor) -> Tensor:
        size = int(torch.randint(side, 2 * side + 1, ()))
        top, left = torch.randint(2 * side - size + 1, (2,)).tolist()
        image = image[None, :, top : top + size, left : left + size]
        image = F.interpolate(image, (side, side), mode="bilinear", antialias=True)[0]
        image = image.flip(-1) if torch.rand(()) < 0.5 else image
        return image * (0.8 + 0.4 * torch.rand(()))

    return Augmented(samples, [number % 2 for number in range(num_samples)], augment)


def _loader(data: Augmented) -> DataLoader[Any]:
    return DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)


def _front(model: Staged, data: Augmented) -> tuple[int, float]:
    """Return how many layers are frozen, and which part of a plain step is their forward."""
    images = next(iter(_loader(data)))[0]
    found = []
    for stop in range(1, len(model.layers)):
        model.freeze(stop)
        shares = [_share(model, images, stop) for _ in range(3)]
        found.append((abs(statistics.median(shares) - SHARE), stop, statistics.median(shares)))
    return min(found)[1:]


def _share(model: Staged, images: Tensor, stop: int) -> float:
    began = time.process_time()
    with torch.no_grad():
        state = model.prefix((images,), stop)
    between = time.process_time()
    model.suffix(state, stop).sum().backward()
    model.zero_grad()
    return (between - began) / (time.process_time() - began)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01, momentum=0.9)


def _epoch(model: nn.Module, loader: Any) -> list[float]:
    """Train for an epoch; return what its steps took, loading included."""
    optimizer, times, began = _optimizer(model), [], time.process_time()
    for inputs, targets in loader:
        _step(model(inputs), targets, optimizer)
        times.append(time.process_time() - began)
        began = time.process_time()
    return times


def _step(logits: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class ByHand:
    """Training with the front's outputs in memory; of each batch, so much is loaded and computed
    anew as with a cache.
    """

    def __init__(self, model: Staged, data: Augmented, stop: int) -> None:
        self._model, self._data, self._stop = copy.deepcopy(model), data, stop
        self._optimizer = _optimizer(self._model)
        with torch.no_grad():
            self._known = torch.cat([self._front(inputs) for inputs, _ in _loader(data)])
        self._labels = torch.tensor(data.labels)

    def _front(self, images: Tensor) -> Tensor:
        features: Tensor = self._model.prefix((images,), self._stop)
        return features

    def epoch(self) -> list[float]:
        """Train for an epoch; return what its steps took, loading included."""
        times, fresh = list[float](), BATCH_SIZE // DEFAULT_REUSE
        for rows in torch.randperm(len(self._known)).split(BATCH_SIZE):
            began, new = time.process_time(), rows[:fresh]
            images = torch.stack([self._data[row][0] for row in new.tolist()])
            state = self._known[rows]
            with torch.no_grad():
                state[:fresh] = self._known[new] = self._front(images)
            _step(self._model.suffix(state, self._stop), self._labels[rows], self._optimizer)
            times.append(time.process_time() - began)
        return times
