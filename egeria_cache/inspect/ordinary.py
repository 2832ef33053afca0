"""One step of an ordinary training loop: how a batch is given to a model, and what its loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from egeria_cache.skip import CallError, ordinary_arguments

__all__ = ["Step", "StepError", "ordinary_step"]

Step = Callable[[nn.Module, Any], Tensor]
"""step(model, batch) -> the loss, a scalar."""


class StepError(ValueError):
    """A batch does not fit the model, as far as can be told; says what to do."""


def ordinary_step(model: nn.Module, batch: Any) -> Tensor:
    """Call the model with what its forward requires of the batch, and return a loss.

    The loss is the model's own (`output.loss`), else the mean square of its outputs: what a step
    costs hardly depends on it.

    Raises:
        StepError: The batch does not fit, or nothing in the output can be differentiated.
    """
    try:
        arguments, by_name = ordinary_arguments(model, batch)
    except CallError as error:
        raise StepError(
            f"{error}; pass --step package.module:callable, called with (model, batch)"
        ) from None
    output = model(*arguments, **by_name)
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
