"""How one cut is served: the steps of the prefix, and what becomes of each on a hit.

For batches of any length: what was proved at a few lengths holds at all others. Sizes follow rules
(`padded.py`). What crosses the boundary without depending on the samples, a table
of positions say, is cut from a longer one where that was shown to be the same, and learnt for each
length where not. What cannot be told for certain is computed plainly, and told from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from egeria_cache.batch import Lengths
from egeria_cache.skip.serve.cut import Cut, Step, TensorSpec
from egeria_cache.skip.serve.invocation import Invocation, plain
from egeria_cache.skip.serve.padded import OutputAxis, Proof, RowGrowth, Rule
from egeria_cache.skip.serve.placeholder import Escape, Placeholder, Scene, Source
from egeria_cache.skip.serve.trace import Draw, Named
from egeria_cache.skip.state.guards import PrefixGuard
from egeria_cache.skip.state.surroundings import Surroundings

Slot = tuple[int, int]
"""(step, leaf of its output)"""
MAX_LENGTHS = 512
"""Lengths of batches that a recipe is kept ready for."""
_REACH = 1.5
"""How much longer than what was tried a batch may be."""
Whole = tuple[int, ...]
_is_training = attrgetter("training")
_MAX_HELD = 256
"""Items of a container that is searched for functions."""


class Unavailable:
    """An object that a skipped module would have made, and whose content nobody may read."""

    def __init__(self, sources: frozenset[Source]) -> None:
        self.__dict__["_sources"] = sources

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Escape.at(self._sources, f".{name}")

    def _refuse(self, *args: Any) -> NoReturn:
        raise Escape.at(self._sources, "the caller")

    __getitem__ = __iter__ = __len__ = __bool__ = _refuse


@dataclass(slots=True)
class StepPlan:
    """One module call of the prefix."""

    module: nn.Module
    name: str
    spec: TreeSpec
    leaves: list[Any]
    """Per leaf of the output: a TensorSpec, or the plain value it always has."""
    run: bool = False
    """Not skipped: it costs little, is trained, or has hooks of the user inside."""
    real: bool = False
    """Whether it must be given real inputs: somebody reads what goes on inside."""
    cached: set[int] = field(default_factory=set)
    """Leaves of the output that are stored with the cut."""
    constants: dict[int, Tensor] = field(default_factory=dict)
    """Leaves that cross the boundary but do not depend on the samples."""
    draws: list[Draw] = field(default_factory=list)
    """Random numbers that it draws to no effect, drawn again so that later ones are the same."""
    single: bool = False
    """Whether the output is one leaf."""
    _sources: list[frozenset[Source]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single = self.spec.is_leaf()

    def sources(self, index: int) -> list[frozenset[Source]]:
        """Name the leaves of the output as step `index`."""
        if not self._sources:
            self._sources = [
                frozenset({Source("step", self.name, index, j)}) for j in range(len(self.leaves))
            ]
        return self._sources


@dataclass(slots=True, eq=False)
class Growth:
    """What a recipe needs to know of other lengths than the one it was proved at."""

    rules: dict[Slot, dict[int, Rule]]
    """Per step and leaf of its output: dimension -> rule; of the batch's own, of its multiple."""
    fills: Mapping[Slot, Any]
    """Of the tensors that are cached."""
    lefts: tuple[bool, ...]
    """Per axis, whether samples are padded on the left."""
    reach: Whole
    """The longest batch that was tried, along each axis."""
    entered: frozenset[int]
    """Axes of leaves that the prefix reads: where others are as long, these count."""
    cuttable: frozenset[Slot] = frozenset()
    """Constants that are the beginning of those of longer batches."""
    constants: dict[Whole, dict[Slot, Tensor]] = field(default_factory=dict)
    """As they were seen at some lengths."""
    outputs: Mapping[int, OutputAxis] = field(default_factory=dict)
    """Leaves of the model's output that are padded."""
    proof: Proof = field(default_factory=Proof)
    """That the loss does not read them."""

    def is_beyond(self, whole: Whole) -> bool:
        """Whether batches of these lengths have to be studied: a model may do otherwise there."""
        return any(n > _REACH * most for n, most in zip(whole, self.reach, strict=True))

    def steps(self, known: Sequence[StepPlan], whole: Whole) -> list[StepPlan] | None:
        """Return the steps for batches of these lengths; None if they have to be seen first."""
        steps = []
        for i, step in enumerate(known):
            leaves, constants = list(step.leaves), dict(step.constants)
            for j, spec in enumerate(leaves):
                if (i, j) in self.rules:
                    leaves[j] = spec.grown(self.rules[i, j], whole)
                    if leaves[j] is None:
                        return None
            for j in constants:
                value = self._constant((i, j), constants[j], leaves[j].shape, whole)
                if value is None:
                    return None
                constants[j] = value
            steps.append(replace(step, leaves=leaves, constants=constants))
        return steps

    def _constant(
        self, slot: Slot, first: Tensor, shape: Sequence[int], whole: Whole
    ) -> Tensor | None:
        if slot not in self.rules:
            return first
        seen = [first, *(values[slot] for values in self.constants.values() if slot in values)]
        if slot in self.cuttable:
            longer = (v for v in seen if all(n >= m for n, m in zip(v.shape, shape, strict=True)))
            value = next(longer, None)
            return None if value is None else value[tuple(slice(0, size) for size in shape)]
        return self.constants.get(whole, {}).get(slot)

    def learn(
        self,
        steps: Sequence[StepPlan],
        whole: Whole,
        batch_size: int,
        outputs: Sequence[Sequence[Any]],
    ) -> str | None:
        """Take in how the steps' outputs looked at these lengths; say which one no rule explains.

        Args:
            steps: The recipe's.
            whole: The lengths of the batch.
            batch_size: Its size.
            outputs: The leaves of every step's output.
        """
        for (i, j), rules in self.rules.items():
            value, spec = outputs[i][j], steps[i].leaves[j]
            if not isinstance(value, Tensor) or value.dim() != len(spec.shape):
                return steps[i].name
            for dim, rule in rules.items():
                size = value.shape[dim]
                if not rule.add(whole, size // batch_size if dim == spec.batch_dim else size):
                    return steps[i].name
        self.keep_constants(steps, whole, outputs)
        return None

    def keep_constants(
        self, steps: Sequence[StepPlan], whole: Whole, outputs: Sequence[Sequence[Any]]
    ) -> None:
        """Remember what crosses the boundary in batches of these lengths, whatever the samples."""
        if len(self.constants) >= MAX_LENGTHS:
            del self.constants[next(iter(self.constants))]
        self.constants[whole] = {
            (i, j): outputs[i][j].detach().clone()
            for i, step in enumerate(steps)
            for j, first in step.constants.items()
            if (i, j) in self.rules
            and self._constant((i, j), first, outputs[i][j].shape, whole) is None
        }

    def of_rows(self, spec: TensorSpec, slot: Slot) -> RowGrowth | None:
        """Return how the rows of a cached tensor grow; None if they are all of one size."""
        rules = self.rules.get(slot)
        if not rules:
            return None
        rows = [(at, rules[dim]) for at, dim in enumerate(spec.row_dims) if dim in rules]
        dims = tuple((at, self.lefts[rule.axis_among(self.entered)]) for at, rule in rows)
        return RowGrowth(dims, tuple(rule for _, rule in rows), self.fills.get(slot, 0))


@dataclass(slots=True, eq=False)
class Recipe:
    """Everything needed to serve one signature of calls at one boundary."""

    boundary: str
    steps: list[StepPlan]
    """In execution order; the last is the boundary."""
    ancestors: list[nn.Module]
    """The modules whose own code calls the steps, the model itself among them."""
    names: Mapping[int, str]
    kept: set[int] = field(default_factory=set)
    """Positions of the loader's leaves that a hit needs for real."""
    same: dict[Slot, Slot] = field(default_factory=dict)
    """Leaves that are the very tensor that is stored for another."""
    entered: set[int] = field(default_factory=set)
    """Positions of the loader's leaves that the prefix reads."""
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """Other tensor arguments that the prefix reads: they must not change."""
    copies: bool = False
    """Whether the model writes into what a hit gives it, which must then be a copy."""
    wants_grad: set[Slot] = field(default_factory=set)
    """Outputs that autograd follows although nothing before them is trained: somebody asked for it
    (`enable_input_require_grads`), so that checkpointed regions behind have a gradient to pass."""
    surroundings: Surroundings | None = None
    """What the code may touch outside of the model, hooks too; None if nothing."""
    moving: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Attributes that the code around the boundary moves before the boundary returns."""
    opaque_outputs: frozenset[int] = frozenset()
    """Leaves of the model's output that cannot be had on a hit."""
    key: tuple[Any, ...] = ()
    """Signature of the calls that it serves."""
    modes: tuple[bool, ...] = ()
    """Training flags of the ancestors."""
    leaf_names: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Position -> (leaf of the loader's batch, operations done to it)."""
    reads: list[Named] = field(default_factory=list)
    """What the prefix computes with beside its modules' own tensors."""
    draws: bool = False
    """Whether the prefix draws random numbers (to no effect on what is cached)."""
    free: frozenset[int] = frozenset()
    """Positions of plain arguments that the prefix does not use: any value fits."""
    attributes: frozenset[tuple[int, str]] = frozenset()
    """(id of an ancestor, name) that code around the boundary reads before it returns."""
    objects: dict[int, frozenset[str]] = field(default_factory=dict)
    """By id of an object that modules hold: which of its attributes are read, if that is known."""
    unread: Mapping[Any, Any] = field(default_factory=dict)
    """What the model counts outside of itself, and no activation depends on; see `Code.unread`."""
    grad_mode: bool | None = None
    """Whether autograd recorded when it was proved; None if that does not matter."""
    profile: tuple[Step, ...] = ()
    guard: PrefixGuard | None = None
    cut: Cut | None = None
    growth: Growth | None = None
    """How it looks for batches of other lengths, where samples are padded."""
    mutable: list[Tensor] = field(default_factory=list)
    """Buffers that the active part writes to: put back if a replay has to be abandoned."""
    ready: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(step, batch size) -> what it returns on every hit, where that is one placeholder."""
    _entries: list[tuple[str, Slot, TensorSpec]] | None = None
    _modules: list[nn.Module] | None = None
    _metas: dict[int, list[list[Tensor | None]]] = field(default_factory=dict)
    _stage: Scene | None = None
    _stand_ins: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    _inputs: dict[tuple[Any, ...], Placeholder] = field(default_factory=dict)
    _saved: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    _grown: dict[tuple[int, ...], Recipe] = field(default_factory=dict)
    """The same for batches of other lengths; one dict for all of them."""

    @property
    def modules(self) -> list[nn.Module]:
        """The distinct modules of the steps."""
        return list({id(step.module): step.module for step in self.steps}.values())

    def at(self, lengths: Lengths | None) -> Recipe | None:
        """Return the recipe for batches of these lengths; None if they have to be seen first."""
        if self.growth is None or lengths is None:
            return self
        known, whole = self._grown, lengths.whole
        if whole not in known:
            steps = self.growth.steps(self.steps, whole)
            if steps is None:
                return None
            if len(known) >= MAX_LENGTHS:
                del known[next(iter(known))]
            known[whole] = replace(
                self, steps=steps, _entries=None, _modules=None, _metas={}, _stage=None,
                _stand_ins={}, _inputs={}, _saved=[], ready={},
            )  # fmt: skip
        return known[whole]

    def settle(self, key: tuple[Any, ...]) -> None:
        """Serve calls of this key; what was made for batches of other lengths has no cut as yet."""
        self.key = key
        self._grown.clear()

    def row_growth(self) -> dict[str, RowGrowth]:
        """Return how the rows of the cached tensors follow the lengths of their samples."""
        if self.growth is None:
            return {}
        found = {
            name: self.growth.of_rows(self.tensor_spec(slot), slot)
            for name, slot in self.slots().items()
        }
        return {name: growth for name, growth in found.items() if growth is not None}

    def fits(self, call: Invocation) -> bool:
        """Whether the inputs and modes are those that it was proved with."""
        lengths = call.batch.lengths
        if self.growth is not None and lengths is not None and self.growth.is_beyond(lengths.whole):
            return False
        if tuple(map(_is_training, self.ancestors)) != self.modes:
            return False
        if self.grad_mode is not None and torch.is_grad_enabled() is not self.grad_mode:
            return False
        for position, known in self.leaf_names.items():
            leaf = call.tagged.get(position)
            if leaf is None:
                if position not in self.kept or position in self.entered:
                    return False
            elif (leaf.leaf, leaf.chain_key) != known:
                return False
        return not self.pinned or all(
            torch.equal(plain(call.leaves[i]), value) for i, value in self.pinned.items()
        )

    def lies_beyond(self, name: str) -> bool:
        """Whether its boundary comes after the module `name`, or contains it."""
        return name.startswith(self.boundary + ".") or any(
            step.name == name or name.startswith(step.name + ".") for step in self.steps[:-1]
        )

    def skipped_modules(self) -> list[tuple[str, nn.Module]]:
        """Return every module that does not run on a hit, at any depth, with its name."""
        modules = {
            id(module): module
            for step in self.steps
            if not step.run
            for module in step.module.modules()
        }
        return [(self.names.get(i, ""), module) for i, module in modules.items()]

    def around(self) -> list[tuple[str, nn.Module, list[str]]]:
        """Return (name, ancestor, names of it that code before the boundary reads)."""
        keys: dict[int, list[str]] = {id(module): [] for module in self.ancestors}
        for owner, key in self.attributes:
            keys[owner].append(key)
        return [(self.names.get(id(m), ""), m, keys[id(m)]) for m in self.ancestors]

    def stored_functions(self) -> list[Any]:
        """Return the functions that modules of the prefix, and the code around it, have as
        attributes.
        """
        kept = [value for _, module in self.skipped_modules() for value in vars(module).values()]
        for _, module, names in self.around():
            kept += [vars(module)[name] for name in names if name in vars(module)]
        return [one for value in kept for one in _functions_in(value)]

    def surrounds(self, module: nn.Module) -> bool:
        """Whether the boundary is called from within `module`, which may be a step as well."""
        return any(module is ancestor for ancestor in self.ancestors)

    def slots(self) -> dict[str, Slot]:
        """Name the cached tensors."""
        named: dict[str, Slot] = {}
        for i, step in enumerate(self.steps):
            for j in sorted(step.cached):
                name = step.name if len(step.leaves) == 1 else f"{step.name}:{j}"
                calls = sum(other.module is step.module for other in self.steps[:i])
                named[f"{name}#{calls}" if calls else name] = (i, j)
        return named

    def entries(self) -> list[tuple[str, Slot, TensorSpec]]:
        """Return name, place and description of the cached tensors; only once it is proved."""
        if self._entries is None:
            self._entries = [(n, slot, self.tensor_spec(slot)) for n, slot in self.slots().items()]
        return self._entries

    def taken_over(self) -> list[nn.Module]:
        """Return `modules`; only once it is proved."""
        if self._modules is None:
            self._modules = self.modules
        return self._modules

    def tensor_spec(self, slot: Slot) -> TensorSpec:
        """Return the spec of a cached tensor."""
        spec = self.steps[slot[0]].leaves[slot[1]]
        assert isinstance(spec, TensorSpec)
        return spec

    @property
    def device(self) -> torch.device:
        """Where the cached tensors are."""
        return self.tensor_spec(next(iter(self.slots().values()))).device

    def scene(self) -> Scene:
        """Begin a run on placeholders."""
        return Scene(self.names, frozenset(map(id, self.ancestors)))

    def stage(self) -> Scene:
        """Begin a run on placeholders that are made once and used by every hit.

        Nothing is left of a run but its placeholders, which have no content; making them anew cost
        more than calling the skipped modules.
        """
        if self._stage is None:
            self._stage = self.scene()
        self._stage.after_boundary = self._stage.finished = False
        return self._stage

    def input_placeholder(self, position: int, leaf: Tensor, scene: Scene) -> Placeholder:
        """Stand for one of the model's inputs on a hit."""
        with torch._C.DisableTorchFunctionSubclass():
            key = (position, leaf.shape, leaf.stride())
        found = self._inputs.get(key)
        if found is None or found.scene is not scene:
            source = frozenset({Source("leaf", self.leaf_names[position][0], position)})
            found = Placeholder.of(leaf, source, scene)
            if len(self._inputs) > 64:
                self._inputs.clear()
            self._inputs[key] = found
        return found

    def save_buffers(self) -> None:
        """Remember what the active part may write to, until `put_back_buffers`."""
        if not self._saved and self.mutable:
            by_type: dict[Any, list[Tensor]] = {}
            for buffer in self.mutable:
                by_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            with torch.inference_mode(False), torch.no_grad():
                self._saved = [(some, [b.clone() for b in some]) for some in by_type.values()]
        with torch.no_grad():
            for buffers, copies in self._saved:
                torch._foreach_copy_(copies, buffers)

    def put_back_buffers(self) -> None:
        """Undo what a run wrote to buffers."""
        with torch.no_grad():
            for buffers, copies in self._saved:
                torch._foreach_copy_(buffers, copies)

    def hit_output(
        self, index: int, batch_size: int, scene: Scene, values: Mapping[Slot, Tensor]
    ) -> Any:
        """Build what step `index` returns on a hit, from placeholders made once."""
        step = self.steps[index]
        leaves = self._stand_ins.get((index, batch_size))
        if leaves is None:
            leaves = self._leaves(index, batch_size, scene)
            if len(self._stand_ins) > 16 * len(self.steps):
                self._stand_ins.clear()
                self.ready.clear()
            self._stand_ins[index, batch_size] = leaves
        if step.cached or step.constants or self.same:
            leaves = self._with_values(index, leaves, values)
        elif step.single:
            self.ready[index, batch_size] = leaves[0]
        return leaves[0] if step.single else tree_unflatten(leaves, step.spec)

    def output(
        self, index: int, batch_size: int, scene: Scene, values: Mapping[Slot, Tensor]
    ) -> Any:
        """Build what step `index` returns in a run on placeholders."""
        leaves = self._with_values(index, self._leaves(index, batch_size, scene), values)
        # Most modules return one tensor: there is nothing to put together.
        step = self.steps[index]
        return leaves[0] if step.single else tree_unflatten(leaves, step.spec)

    def _leaves(self, index: int, batch_size: int, scene: Scene) -> list[Any]:
        """Return what stands for the leaves of a step's output where nothing was stored."""
        step, leaves = self.steps[index], list[Any]()
        metas, sources = self._metas_at(batch_size)[index], step.sources(index)
        for j, leaf in enumerate(step.leaves):
            if isinstance(leaf, TensorSpec):
                meta = metas[j]
                assert meta is not None
                leaves.append(Placeholder.like(meta, leaf.device, sources[j], scene))
            elif isinstance(leaf, Unavailable):
                leaves.append(Unavailable(sources[j]))
            else:
                leaves.append(leaf)
        return leaves

    def _with_values(
        self, index: int, leaves: list[Any], values: Mapping[Slot, Tensor]
    ) -> list[Any]:
        """Put stored values and constants in their places."""
        step, leaves = self.steps[index], list(leaves)
        for j in range(len(leaves)):
            slot = self.same.get((index, j), (index, j))
            if slot in values:
                leaves[j] = values[slot]
            elif j in step.constants:
                leaves[j] = step.constants[j].clone() if self.copies else step.constants[j]
        return leaves

    def _metas_at(self, batch_size: int) -> list[list[Tensor | None]]:
        metas = self._metas.get(batch_size)
        if metas is None:
            if len(self._metas) > 16:
                self._metas.clear()
            meta = torch.device("meta")
            metas = self._metas[batch_size] = [
                [x.empty(batch_size, meta) if isinstance(x, TensorSpec) else None
                 for x in step.leaves]
                for step in self.steps
            ]  # fmt: skip
        return metas


def _functions_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the functions that stand in an attribute, or in containers there."""
    if isinstance(value, FunctionType | MethodType | partial):
        yield value
    elif depth and isinstance(value, list | tuple | dict) and len(value) <= _MAX_HELD:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _functions_in(one, depth - 1)
