"""Models that nobody froze, called in evaluation mode under `no_grad`: what they give is a feature.

Nothing trains through such a call, whatever `requires_grad` says; for its duration the weights are
marked so. Once they have moved, or the model was called to train it, that is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from egeria_cache.batch import BatchTensor


class Features:
    """Tells the calls of one model that compute features.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.is_trained = not self._parameters
        """Whether the model was trained here."""
        self._versions: list[int] | None = None

    def are_computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call is one, of a model that was never trained here: of a loader's batch, or
        one after such a call."""
        if self.is_trained:
            return False
        if torch.is_grad_enabled() or self._model.training:
            self.is_trained |= torch.is_grad_enabled()
            return False
        given = (*args, *kwargs.values())
        if self._versions is None and not any(isinstance(one, BatchTensor) for one in given):
            return False
        versions = [p._version for p in self._parameters]
        self.is_trained = self._versions not in (None, versions)
        self._versions = versions
        return not self.is_trained

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Mark the weights as not trained."""
        marked = [p for p in self._parameters if p.requires_grad]
        try:
            for parameter in marked:
                parameter.requires_grad = False
            yield
        finally:
            for parameter in marked:
                parameter.requires_grad = True
