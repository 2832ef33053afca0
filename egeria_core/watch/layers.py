"""Layer modules of a model: the units that freeze, in forward order and of comparable size.

A single small layer (one Linear, one BatchNorm) trains unsteadily; a module that holds most of
the weights freezes too late to be of use. So consecutive blocks of one stage are grouped until the
groups are about equal in parameters (section 4.2.1: ResNet-56's stage 3, with 75 % of the weights,
is split finer than stages 1 and 2).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from egeria_cache import EgeriaError
from egeria_cache.skip import blocks, differs_in_training, holds_stage

SMALL = 0.1
"""A unit below this part of the ideal size (a stem, a norm, a small head) joins its neighbour."""
LIGHT = 0.05
"""A layer with less than this part of the forward's arithmetic joins the next one: to freeze it
saves nothing, and an embedding alone does half of the harm that freezing does (measured)."""


class LayerError(EgeriaError):
    """The model offers no layers that could be frozen one after another."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive modules that are judged and frozen together."""

    modules: tuple[str, ...]
    """Qualified names in forward order."""
    num_parameters: int
    """Scalars in these modules, shared ones counted once in the model."""

    cost: float = field(default=0.0, compare=False, repr=False)
    """Of their forward, in any unit; 0 for tables that are only looked up."""

    @property
    def boundary(self) -> str:
        """Name of the last module: freezing this layer makes it the boundary."""
        return self.modules[-1]

    def __add__(self, after: Layer) -> Layer:
        size, cost = self.num_parameters + after.num_parameters, self.cost + after.cost
        return Layer(self.modules + after.modules, size, cost)


def find_layers(
    model: nn.Module,
    pattern: str | None = None,
    *,
    num_layers: int = 7,
    order: Mapping[str, int] | None = None,
    costs: Mapping[str, float] | None = None,
) -> list[Layer]:
    """Parse `model` into layers, front first.

    Args:
        model: Any model; a DistributedDataParallel wrapper is the caller's to take off.
        pattern: Regular expression; every module whose whole qualified name matches becomes one
            layer (`r"layer\\d+\\.\\d+"`), instead of the balanced parse.
        num_layers: Wanted number of layers of the balanced parse; the model's own blocks are
            never cut, so that the result may have fewer or a few more. 7 are what the paper uses
            for ResNet-56; more layers freeze in finer steps but each needs its own 2 W evaluations,
            so that deep ones are never reached.
        order: Position of each module's return in a real forward, by name. Modules that are not
            in it did not run and are left out. Without it, registration order is forward order.
        costs: Arithmetic of each module's own code in a real forward, by name. A layer of the
            balanced parse with less than 5 % of all joins the next one, the last one aside, which
            never freezes. Without it that is known of embeddings only.

    Raises:
        LayerError: Fewer than two layers: nothing could ever be frozen.
        ValueError: `num_layers` is below 2.
    """
    if num_layers < 2:
        raise ValueError(f"num_layers must be at least 2, got {num_layers}")
    if pattern is not None:
        names = _matching(model, pattern)
    else:
        too_big = 2 * _size(model) / num_layers
        names = [*blocks(model, opens=lambda b: _size(b) > too_big and holds_stage(b))]
    layers = _count(model, names, costs)
    if order is not None:
        layers = sorted((x for x in layers if x.boundary in order), key=lambda x: order[x.boundary])
    if pattern is None:
        layers = _balance(layers, num_layers, 0.0 if costs is None else LIGHT)
        layers = _hand_on(model, layers)
    while len(layers) > 1 and layers[-1].num_parameters == 0:
        # A head that is tied to the embedding: with all before it frozen, nothing would train.
        *layers, before, head = layers
        layers.append(before + head)
    if len(layers) < 2:
        raise LayerError(
            f"{type(model).__name__} has {len(layers)} layer(s) "
            + (f"matching {pattern!r}" if pattern is not None else "with parameters")
            + "; at least 2 are needed, because the last one is never frozen"
        )
    return layers


def draws(module: nn.Module) -> bool:
    """Whether a module of torch's draws random numbers by itself in training mode."""
    return differs_in_training(module) and not isinstance(module, _NormBase)


def _hand_on(model: nn.Module, layers: list[Layer]) -> list[Layer]:
    """Let no layer end in what draws or keeps statistics without a weight to freeze.

    A dropout or a norm behind the last weights belongs to what trains on: it goes to the next
    layer, with all that follows it.
    """
    handed: list[Layer] = []
    carry: tuple[str, ...] = ()
    for layer in layers[:-1]:
        names = carry + layer.modules
        end = len(names)
        for number, module in reversed([*enumerate(map(model.get_submodule, names))]):
            if next(module.parameters(), None) is not None:
                break
            if any(map(differs_in_training, module.modules())):
                end = number
        handed.append(Layer(names[:end], layer.num_parameters))
        carry = names[end:]
    return [*handed, *(Layer(carry + last.modules, last.num_parameters) for last in layers[-1:])]


def _matching(model: nn.Module, pattern: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
    inside = [n for n in names if any(n != m and n.startswith(m + ".") for m in names)]
    if inside:
        raise LayerError(
            f"pattern {pattern!r} matches {inside[0]!r} and also a module that contains it; "
            "layers must not overlap"
        )
    return names


def _count(model: nn.Module, names: list[str], costs: Mapping[str, float] | None) -> list[Layer]:
    """Return a layer per module; a parameter shared by several counts for the first."""
    seen: set[int] = set()
    layers = []
    for name in names:
        own = {id(p): p.numel() for p in model.get_submodule(name).parameters()}
        size = sum(count for key, count in own.items() if key not in seen)
        seen |= own.keys()
        layers.append(Layer((name,), size, _cost(model, name, costs)))
    return layers


def _cost(model: nn.Module, name: str, costs: Mapping[str, float] | None) -> float:
    """Return what a module's forward costs; without measured costs only tables are known."""
    if costs is not None:
        return sum(own for n, own in costs.items() if n == name or n.startswith(name + "."))
    modules = model.get_submodule(name).modules()
    owners = (m for m in modules if any(p is not None for p in m._parameters.values()))
    return float(not all(isinstance(m, nn.Embedding) for m in owners))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _balance(layers: list[Layer], num_layers: int, light: float) -> list[Layer]:
    """Group neighbours into about equal sizes without crossing from one stage into another."""
    ideal = sum(layer.num_parameters for layer in layers) / num_layers
    groups: list[Layer] = []
    for _, run in itertools.groupby(layers, key=lambda layer: layer.boundary.rpartition(".")[0]):
        stage = list(run)
        size = sum(layer.num_parameters for layer in stage)
        groups.extend(_split(stage, size, max(1, round(size / ideal)) if ideal else 1))
    return _absorb(groups, SMALL * ideal, light * sum(layer.cost for layer in layers))


def _split(stage: list[Layer], size: int, parts: int) -> list[Layer]:
    """Cut one stage into `parts` about equal runs; what has no weights never starts one."""
    groups: list[Layer] = []
    done = 0
    for layer in stage:
        part = int((done + layer.num_parameters / 2) * parts / size) if size else 0
        if not groups or (part > len(groups) - 1 and layer.num_parameters > 0):
            groups.append(layer)
        else:
            groups[-1] += layer
        done += layer.num_parameters
    return groups


def _absorb(groups: list[Layer], least: float, light: float) -> list[Layer]:
    """Merge groups with few weights, or whose forward costs little, with what follows (a stem).

    The last one stays, light or not, and joins the one before if it is small. Where one layer has
    nearly all the weights, what is in front of it stays a layer.
    """
    if len(groups) < 2:
        return groups
    merged: list[Layer] = []
    carry = nothing = Layer((), 0)
    for group in groups[:-1]:
        carry += group
        if carry.num_parameters >= least and carry.cost > 0 and carry.cost >= light:
            merged.append(carry)
            carry = nothing
    last = carry + groups[-1]
    while len(merged) > 1 and last.num_parameters < least:
        last = merged.pop() + last
    return [*merged, last] if merged else [groups[0], sum(groups[2:], groups[1])]
