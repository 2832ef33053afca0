"""Stateless dropout: masks inside the frozen prefix that belong to the sample, not to the step.

In inference mode a frozen dropout passes its input on. With `dropout="stateless"` it stays active,
and the mask of each row is drawn from (seed, sample ID, draw), the module's name and the number
of its call: an activation is then a function of the sample and its draw, and can be stored. It
is the same in a full batch, a mixed one, an audit or a rehearsal, since each of them says which
samples its rows are (`serving`, `only`); a dropout layer whose rows cannot be told from its input's
shape is refused, and one that tells them wrongly fails the proof of per-sample independence.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from egeria_cache.batch import Batch, sample_seed
from egeria_cache.device import uploaded
from egeria_cache.errors import BoundaryError
from egeria_cache.skip.model.calls import intercept, is_compiled
from egeria_cache.skip.model.frozen import FrozenPrefix, mode_asked_for

log = logging.getLogger("egeria")

_WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
_FAMILY = (nn.Dropout, *_WHOLE_CHANNELS, *_ALPHA)
_ALPHA_PRIME = -1.7580993408473766
"""Negative saturation value of SELU, which alpha dropout sets dropped values to."""


class _Rows:
    """Which samples the rows of the forward are that runs at the moment."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self.num_calls: dict[str, int] = {}


_ROWS: ContextVar[_Rows | None] = ContextVar("egeria_dropout_rows", default=None)
"""Set inside a forward of the engine alone; never outlives it."""


@contextmanager
def only(rows: Sequence[int]) -> Iterator[None]:
    """Say that the forward inside the block runs on these rows of the batch, in this order."""
    now = _ROWS.get()
    if now is None:
        yield
        return
    token = _ROWS.set(_Rows([now.seeds[row] for row in rows]))
    try:
        yield
    finally:
        _ROWS.reset(token)


def counting_calls(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model's forward: each of its runs counts the calls of a layer from zero."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        rows = _ROWS.get()
        if rows is not None:
            rows.num_calls.clear()
        return forward(*args, **kwargs)

    return run


class StatelessDropout:
    """The dropout layers of one model. Used from the training thread only.

    Args:
        model: The model; layers inside compiled modules are left alone.
        held: The frozen prefix: only layers that it holds are stateless, those behind the boundary
            stay as they are. They are active while `model.train()` was asked for last.
    """

    def __init__(self, model: nn.Module, held: FrozenPrefix) -> None:
        self._held = held
        self._layers = dict(_layers(model, ""))
        self._names = {id(layer): name for name, layer in self._layers.items()}
        self._told: set[str] = set()
        self.error: BoundaryError | None = None
        """Why the last forward could not be cached."""

    def key(self) -> tuple[bool, ...]:
        """Which layers are active: calls that differ in it are served by different recipes."""
        return tuple(mode_asked_for(layer) for layer in self._layers.values())

    def fields(self, skipped: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
        """Return the part of a cut's address; nothing where no skipped layer is active."""
        skipped = list(skipped)
        self._warn_of_others(skipped)
        active = [
            self._names[id(module)]
            for _, module in skipped
            if id(module) in self._names and mode_asked_for(module)
        ]
        return {"stateless_dropout": sorted(active)} if active else {}

    @contextmanager
    def serving(self, batch: Batch) -> Iterator[None]:
        """Draw masks for the samples of `batch` inside the block."""
        self.error = None
        seed = getattr(getattr(batch.context, "source", None), "seed", None) or 0
        seeds = [
            sample_seed(seed, *one) for one in zip(batch.ids, batch.draws.tolist(), strict=True)
        ]
        token = _ROWS.set(_Rows(seeds))
        try:
            with intercept(self._layers.values(), self._call):
                yield
        finally:
            _ROWS.reset(token)

    def _call(self, layer: nn.Module, original: Callable[..., Any], x: Tensor) -> Any:
        rows = _ROWS.get()
        if rows is None or layer not in self._held or not mode_asked_for(layer):
            return original(x)
        name, num_rows = self._names[id(layer)], len(rows.seeds)
        number = rows.num_calls[name] = rows.num_calls.get(name, -1) + 1
        p = float(layer.p)  # type: ignore[arg-type]
        if p == 0:
            return original(x)
        if x.dim() == 0 or x.shape[0] % num_rows:
            self.error = self.error or BoundaryError(
                f"dropout {name!r} in the frozen prefix is given a tensor of shape "
                f"{tuple(x.shape)} for {num_rows} samples, so that its masks cannot be told apart "
                "by sample; use dropout='off', or an earlier boundary"
            )
            return original(x)
        seeds = [sample_seed(seed, name, number) for seed in rows.seeds]
        return _drop(layer, x, p, _masks(seeds, _mask_shape(layer, x), 1 - p))

    def _warn_of_others(self, skipped: Iterable[tuple[str, nn.Module]]) -> None:
        """Say once which modules seem to apply dropout on their own: that stays off."""
        others = [
            name
            for name, module in skipped
            if id(module) not in self._names
            and any(
                "drop" in key and isinstance(value, float) and value > 0
                for key, value in vars(module).items()
            )
        ]
        new = [name for name in others if name not in self._told]
        self._told.update(new)
        if new:
            log.warning(
                "dropout='stateless' acts in layers such as nn.Dropout; what %s may drop in "
                "code of their own stays off in the frozen prefix",
                ", ".join(map(repr, new)),
            )


def _layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, _FAMILY):
        yield name, module
    for key, child in module.named_children():
        if not is_compiled(child):
            yield from _layers(child, f"{name}.{key}" if name else key)


def _mask_shape(layer: nn.Module, x: Tensor) -> tuple[int, ...]:
    if isinstance(layer, _WHOLE_CHANNELS):
        return (*x.shape[:2], *(1 for _ in x.shape[2:]))
    return tuple(x.shape)


def _masks(seeds: Sequence[int], shape: tuple[int, ...], keep: float) -> Tensor:
    """Return 1 where a value is kept, float32 on the CPU; one generator's draw per sample."""
    with torch.inference_mode(False), torch.no_grad():
        masks = torch.empty((len(seeds), shape[0] // len(seeds), *shape[1:]))
        generator = torch.Generator()
        for mask, seed in zip(masks, seeds, strict=True):
            generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
            mask.bernoulli_(keep, generator=generator)
        return masks.view(shape)


def _drop(layer: nn.Module, x: Tensor, p: float, masks: Tensor) -> Tensor:
    if isinstance(layer, _ALPHA):
        scale = 1 / math.sqrt((1 + p * _ALPHA_PRIME**2) * (1 - p)) if p < 1 else 0.0
        shift = (1 - masks) * (scale * _ALPHA_PRIME) - scale * _ALPHA_PRIME * p
    else:
        scale, shift = (1 / (1 - p) if p < 1 else 0.0), None
    factor = uploaded((masks * scale).to(x.dtype), x.device)
    if getattr(layer, "inplace", False):
        x.mul_(factor)
        return x if shift is None else x.add_(uploaded(shift.to(x.dtype), x.device))
    dropped = x * factor
    return dropped if shift is None else dropped + uploaded(shift.to(x.dtype), x.device)
