"""Layer modules of a model: the units that freeze, in forward order and of comparable size.

A single small layer (one Linear, one BatchNorm) trains unsteadily; a module that holds most of
the weights freezes too late to be of use. So consecutive blocks of one stage are grouped until the
groups are about equal in parameters (section 4.2.1: ResNet-56's stage 3, with 75 % of the weights,
is split finer than stages 1 and 2).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from egeria_cache import EgeriaError
from egeria_cache.skip import blocks, differs_in_training, holds_stage

DEFAULT_NUM_LAYERS = 7
"""What the paper uses for ResNet-56; more layers freeze in finer steps but each needs its own
2 W evaluations, so that deep ones are never reached."""
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

    @property
    def boundary(self) -> str:
        """Name of the last module: freezing this layer makes it the boundary."""
        return self.modules[-1]


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    stage: str
    num_parameters: int
    cost: float
    """Of its forward, in any unit; 0 for a table that is only looked up."""


def find_layers(
    model: nn.Module,
    pattern: str | None = None,
    *,
    num_layers: int = DEFAULT_NUM_LAYERS,
    order: Mapping[str, int] | None = None,
    costs: Mapping[str, float] | None = None,
) -> list[Layer]:
    """Parse `model` into layers, front first.

    Args:
        model: Any model; a DistributedDataParallel wrapper is the caller's to take off.
        pattern: Regular expression; every module whose whole qualified name matches becomes one
            layer (`r"layer\\d+\\.\\d+"`), instead of the balanced parse.
        num_layers: Wanted number of layers of the balanced parse; the model's own blocks are
            never cut, so that the result may have fewer or a few more.
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
        units = _matching_units(model, pattern)
    else:
        too_big = 2 * _size(model) / num_layers
        names = blocks(model, opens=lambda block: _size(block) > too_big and holds_stage(block))
        units = _count(model, [(name, name.rpartition(".")[0]) for name in names], costs)
    if order is not None:
        units = sorted((u for u in units if u.name in order), key=lambda u: order[u.name])
    if pattern is not None:
        layers = [Layer((unit.name,), unit.num_parameters) for unit in units]
    else:
        light = 0.0 if costs is None else LIGHT
        layers = _hand_on(model, _balance(units, num_layers, light))
    while len(layers) > 1 and layers[-1].num_parameters == 0:
        # A head that is tied to the embedding: with all before it frozen, nothing would train.
        *layers, before, head = layers
        layers.append(Layer(before.modules + head.modules, before.num_parameters))
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
        names, carry = carry + layer.modules, ()
        kept = len(names)
        while kept and not any(True for _ in model.get_submodule(names[kept - 1]).parameters()):
            kept -= 1
        moving = (i for i in range(kept, len(names)) if _is_alive(model.get_submodule(names[i])))
        end = next(moving, len(names))
        names, carry = names[:end], names[end:]
        handed.append(Layer(names, layer.num_parameters))
    return [*handed, *(Layer(carry + last.modules, last.num_parameters) for last in layers[-1:])]


def _is_alive(module: nn.Module) -> bool:
    """Whether something inside draws, or has statistics that run, in training mode."""
    return any(map(differs_in_training, module.modules()))


def _matching_units(model: nn.Module, pattern: str) -> list[_Unit]:
    names = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
    inside = [n for n in names if any(n != m and n.startswith(m + ".") for m in names)]
    if inside:
        raise LayerError(
            f"pattern {pattern!r} matches {inside[0]!r} and also a module that contains it; "
            "layers must not overlap"
        )
    return _count(model, [(name, name) for name in names], None)


def _count(
    model: nn.Module, names: list[tuple[str, str]], costs: Mapping[str, float] | None
) -> list[_Unit]:
    """Attach sizes and costs; a parameter shared by several units counts for the first."""
    seen: set[int] = set()
    units = []
    for name, stage in names:
        size = 0
        for parameter in model.get_submodule(name).parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                size += parameter.numel()
        units.append(_Unit(name, stage, size, _cost(model, name, costs)))
    return units


def _cost(model: nn.Module, name: str, costs: Mapping[str, float] | None) -> float:
    """Return what a module's forward costs; without measured costs only tables are known."""
    if costs is not None:
        inside = (own for n, own in costs.items() if n == name or n.startswith(name + "."))
        return sum(inside)
    modules = model.get_submodule(name).modules()
    owners = (m for m in modules if any(p is not None for p in m._parameters.values()))
    return float(not all(isinstance(m, nn.Embedding) for m in owners))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _balance(units: Sequence[_Unit], num_layers: int, light: float) -> list[Layer]:
    """Group neighbours into about equal sizes without crossing from one stage into another."""
    total = sum(unit.num_parameters for unit in units)
    ideal = total / num_layers
    groups: list[list[_Unit]] = []
    for _, run in itertools.groupby(units, key=lambda unit: unit.stage):
        stage = list(run)
        size = sum(unit.num_parameters for unit in stage)
        groups.extend(_split(stage, max(1, round(size / ideal)) if ideal else 1))
    groups = _absorb(groups, SMALL * ideal, light * sum(unit.cost for unit in units))
    return [
        Layer(tuple(unit.name for unit in group), sum(unit.num_parameters for unit in group))
        for group in groups
    ]


def _split(stage: list[_Unit], parts: int) -> list[list[_Unit]]:
    """Cut one stage into `parts` about equal runs; units without weights never start one."""
    size = sum(unit.num_parameters for unit in stage)
    groups: list[list[_Unit]] = []
    done = 0
    for unit in stage:
        part = int((done + unit.num_parameters / 2) * parts / size) if size else 0
        if not groups or (part > len(groups) - 1 and unit.num_parameters > 0):
            groups.append([])
        groups[-1].append(unit)
        done += unit.num_parameters
    return groups


def _absorb(groups: list[list[_Unit]], least: float, light: float) -> list[list[_Unit]]:
    """Merge groups with few weights, or whose forward costs little, with what follows (a stem).

    The last one stays, light or not, and joins the one before if it is small. Where one layer has
    nearly all the weights, what is in front of it stays a layer.
    """

    def is_small(group: list[_Unit]) -> bool:
        return sum(unit.num_parameters for unit in group) < least

    def is_enough(group: list[_Unit]) -> bool:
        cost = sum(unit.cost for unit in group)
        return not is_small(group) and cost > 0 and cost >= light

    if len(groups) < 2:
        return groups
    merged, last = _merge(groups[:-1], is_enough), groups[-1]
    while (merged and not is_enough(merged[-1])) or (len(merged) > 1 and is_small(last)):
        last = merged.pop() + last
    return [*merged, last] if merged else [groups[0], [*itertools.chain(*groups[1:])]]


def _merge(
    groups: list[list[_Unit]], is_enough: Callable[[list[_Unit]], bool]
) -> list[list[_Unit]]:
    """Merge neighbours until each is enough; what is left over in the end is the last group."""
    merged: list[list[_Unit]] = []
    carry: list[_Unit] = []
    for group in groups:
        carry = carry + group
        if is_enough(carry):
            merged.append(carry)
            carry = []
    return [*merged, carry] if carry else merged
