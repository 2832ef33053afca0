"""One step of an ordinary training loop: how a batch is given to a model, and what its loss is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["Step", "StepError", "ordinary_step"]

Step = Callable[[nn.Module, Any], Tensor]
"""step(model, batch) -> the loss, a scalar."""


class StepError(ValueError):
    """A batch does not fit the model, as far as can be told; says what to do."""


def ordinary_step(model: nn.Module, batch: Any) -> Tensor:
    """Call the model with what its forward requires of the batch, and return a loss.

    A mapping is given by name, whatever the forward takes; of a tuple the first leaves, as many as
    it requires. The loss is the model's own (`output.loss`), else the mean square of its outputs:
    what a step costs hardly depends on it.

    Raises:
        StepError: The batch does not fit, or nothing in the output can be differentiated.
    """
    output = model(*_arguments(model, batch), **_keywords(model, batch))
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own.mean()
    terms = [
        leaf.float().square().mean()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not terms:
        raise StepError(
            f"nothing that {type(model).__name__} returns can be differentiated; pass --step "
            "package.module:callable, called with (model, batch), which returns the loss"
        )
    return torch.stack(terms).sum()


def _arguments(model: nn.Module, batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return []
    if not isinstance(batch, tuple | list):
        return [batch]
    required = sum(
        one.default is one.empty for one in _parameters(model) if one.kind in _POSITIONAL
    )
    if required > len(batch):
        raise StepError(
            f"{type(model).__name__}.forward requires {required} arguments, a batch has "
            f"{len(batch)}; pass --step package.module:callable, called with (model, batch)"
        )
    return list(batch[: max(1, required)])


def _keywords(model: nn.Module, batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        return {}
    parameters = _parameters(model)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(batch)
    taken = {one.name for one in parameters}
    given = {name: value for name, value in batch.items() if name in taken}
    if not given:
        raise StepError(
            f"a batch has {', '.join(map(str, batch))}, {type(model).__name__}.forward takes "
            f"{', '.join(sorted(taken))}; pass --step package.module:callable, called with "
            "(model, batch)"
        )
    return given


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    # Of the class: the instance's forward may be wrapped while a cache is attached.
    return list(inspect.signature(type(model).forward).parameters.values())[1:]
