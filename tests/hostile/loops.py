"""Loops that many tries share: train, or train and change something on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.hostile.harness import Run, sgd
from tests.hostile.nets import Net, rows


def trained(
    run: Run,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    boundary: str = "middle",
    epochs: int = 3,
    each_epoch: Callable[[Any, int], Any] | None = None,
    each_step: Callable[[Any, int], Any] | None = None,
    optimizer: Callable[[Any], Any] = sgd,
    **kwargs: Any,
) -> nn.Module:
    """Train a model, `Net` if not said otherwise, over a data set, and return it.

    What is done each epoch or step is given the model; kwargs are the loader's.
    """
    model = run.freeze(model or Net(), boundary)
    run.fit(
        model, run.loader(rows() if data is None else data, **kwargs), epochs, loss=loss,
        optimizer=optimizer(model),
        each_epoch=each_epoch and functools.partial(each_epoch, model),
        each_step=each_step and functools.partial(each_step, model),
    )  # fmt: skip
    return model


def changed(
    run: Run,
    change: Callable[[Any], Any],
    model: nn.Module | None = None,
    data: Any = None,
    *,
    epochs: int = 3,
    at: int = 1,
    boundary: str = "middle",
) -> None:
    """Train for some epochs, and do something to the model before one of them."""
    model = run.freeze(model or Net(), boundary)
    optimizer = sgd(model)

    def each_epoch(epoch: int) -> None:
        if epoch != at:
            return
        run.turn()
        change(model)
        add_new(optimizer, model)

    loader = run.loader(rows() if data is None else data)
    run.fit(model, loader, epochs, each_epoch=each_epoch, optimizer=optimizer)


def one_ahead(loader: Any) -> Iterator[Any]:
    """Yield each batch when the next one was asked for."""
    batches = iter(loader)
    for batch in batches:
        for following in batches:
            yield batch
            batch = following
        yield batch


def add_new(optimizer: Any, model: nn.Module) -> None:
    """Have an optimizer train what a model has that it does not know."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in model.parameters() if id(p) not in known]
    if new:
        optimizer.add_param_group({"params": new})


def numbered(function: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return a loss that calls `function(model, x, y, step)`."""
    steps = iter(range(10_000))
    return lambda model, batch: function(model, *batch, next(steps))


def ce(model: Any, x: Any, y: Any) -> Tensor:
    return F.cross_entropy(model(x), y)
