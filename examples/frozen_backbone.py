"""The cache without the controller: train a new head on a frozen, pre-trained backbone.

The commonest real use. A small ResNet learns the digits 0-4; its backbone is frozen, and a new head
learns all ten digits on top of it. The first epoch fills the cache; from the second on neither the
images nor the backbone are touched. So small a backbone would hardly win back its proof in six
epochs, and `gate="always"` does not wait to see whether it does.

Run `python examples/frozen_backbone.py [--cache DIR]`; with a directory, a second run starts with
every sample a hit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from digits import Digits, ResNet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from egeria_cache import ActivationCache, EgeriaLoader


def pretrain(model: nn.Module, epochs: int) -> None:
    """Train the whole model on the digits 0-4."""
    digits = Digits(train=True)
    few = Subset(digits, [i for i, target in enumerate(digits.targets) if target < 5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for images, targets in DataLoader(few, 64, shuffle=True):
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: Any) -> float:
    """Return the fraction of the loader's samples that are classified right."""
    model.eval()
    right = sum(int((model(images).argmax(1) == targets).sum()) for images, targets in loader)
    return right / len(loader.dataset)


def main(argv: list[str] | None = None) -> int:
    """Pre-train, freeze, and train the head with the cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", default=None, help="directory of the cache (default: temporary)")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = ResNet()
    pretrain(model, epochs=3)
    model.head = nn.Linear(model.head.in_features, 10)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
        parameter.grad = None

    train_set = Digits(train=True, augment=False)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ActivationCache(
            model, args.cache or scratch, boundary="layer3", gate="always"
        ) as cache,  # +
    ):
        train = EgeriaLoader(train_set, 64, shuffle=True, cache=cache)  # +
        test = EgeriaLoader(Digits(train=False), 64, cache=cache, name="test")  # +
        optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-3)
        for epoch in range(args.epochs):
            start, before = time.perf_counter(), cache.stats().hits
            model.train()
            for images, targets in train:
                loss = F.cross_entropy(model(images), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seconds = time.perf_counter() - start
            print(
                f"epoch {epoch}: {seconds:5.2f} s, {cache.stats().hits - before:4d} of "
                f"{len(train_set)} samples from the cache, "
                f"test accuracy {accuracy(model, test):.3f}"
            )
        cache.flush()
        print(f"{cache.stats().bytes_on_disk / 1e6:.1f} MB on disk")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
