"""How a model is called with a batch, where nobody says: as most training loops do it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria_cache.errors import EgeriaError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallError(EgeriaError):
    """A batch does not fit the model's forward, as far as can be told."""


def ordinary_arguments(model: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, by place and by name, with which a loop would call a model.

    A mapping is given by name, without what the forward does not take; of a list or tuple the first
    parts, as many as the forward requires; anything else is the only argument.

    Raises:
        CallError: A mapping has no name that the forward takes, or a list has too few parts.
    """
    parameters = _parameters(model)
    if isinstance(batch, Mapping):
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return [], dict(batch)
        taken = {one.name for one in parameters}
        given = {name: value for name, value in batch.items() if name in taken}
        if not given:
            raise CallError(
                f"a batch has {', '.join(map(str, batch))}, {type(model).__name__}.forward takes "
                f"{', '.join(sorted(taken))}"
            )
        return [], given
    if not isinstance(batch, tuple | list):
        return [batch], {}
    required = sum(one.default is one.empty for one in parameters if one.kind in _POSITIONAL)
    if required > len(batch):
        raise CallError(
            f"{type(model).__name__}.forward requires {required} arguments, a batch has "
            f"{len(batch)}"
        )
    return list(batch[: max(1, required)]), {}


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    # Of the class: the instance's forward may be wrapped while a cache is attached.
    return list(inspect.signature(type(model).forward).parameters.values())[1:]
