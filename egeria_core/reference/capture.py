"""Captures the frontmost active layer: what went into it, its structure, and its weights.

Arguments are captured on evaluation steps only. The hooks are registered once, before anyone
compiles the model (a hook added afterwards never fires), and do nothing until armed. Hooks of
frozen layers stay inert: on a batch that comes from the activation cache they would see
placeholders without data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from egeria_cache import FrozenPrefix
from egeria_cache.device import runs_late, to_host
from egeria_core.ranks import without_hooks
from egeria_core.watch import Hook

# A cache of keys and values is updated by the call it is given to: replaying the call with it
# would attend to every token twice. Training never reads one.
_STATEFUL_ARGUMENTS = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params"})


class Call(NamedTuple):
    """Arguments that one module of the layer was called with, reduced to the probe's rows.

    Plain containers, values and tensors, as they are saved.
    """

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wires: dict[int, tuple[int, int]]
    """Which of the arguments' leaves, by number, are which leaves of which earlier calls' outputs;
    None is in their places."""


@dataclass(slots=True)
class Probe:
    """One capture of one layer: enough to run it again anywhere."""

    calls: list[Call] = field(default_factory=list)
    """The last modules of the layer that feed each other directly."""
    num_rows: int = 0
    """Rows kept of the batch it was taken from."""

    def mapped(self, function: Callable[[Any], Any]) -> Probe:
        """Return the probe with a function of each tensor of the arguments."""
        return replace(self, calls=tree_map_only(Tensor, function, self.calls))


def first_activation(output: Any, rows: int) -> Tensor | None:
    """Return the first floating-point leaf with so many rows."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:1] == (rows,):
            return leaf
    return None


class LayerTap:
    """Hooks on every layer's modules; records one layer, once, after `arm`.

    Args:
        model: The bare model.
        layers: Module names of each layer, in forward order.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Sequence[str]]) -> None:
        self._model = model
        self.num_rows = self._batch = 0
        self.armed: int | None = None
        """The layer that was armed last and not taken yet."""
        self._training: bool | None = None
        self._hooks = ExitStack()
        self._forget()
        until_closed = self._hooks.enter_context
        for index, names in enumerate(layers):
            for position, name in enumerate(names):
                module = model.get_submodule(name)
                before = Hook(partial(self._before, index, position == 0, name))
                after = Hook(partial(self._after, index, position == len(names) - 1))
                until_closed(module.register_forward_pre_hook(before, with_kwargs=True))
                until_closed(module.register_forward_hook(after))

    def _forget(self) -> None:
        self._probe = Probe()
        self._outputs: list[list[tuple[Any, int]]] = []
        self._done = False

    def arm(self, layer: int, num_rows: int, *, training: bool | None = None) -> None:
        """Record the next forward of `layer` with gradients on, in this mode of the model.

        A validation pass between two steps is no training forward: by its mode (None: whatever
        it is), and by its gradients being off.
        """
        self._forget()
        self.armed, self.num_rows, self._training = layer, num_rows, training

    def take(self) -> Probe | None:
        """Return what was recorded since `arm`, if anything was, and disarm."""
        probe = self._probe if self._done else None
        self.armed = None
        self._forget()
        return probe

    def close(self) -> None:
        """Remove every hook; idempotent."""
        self._hooks.close()
        self.armed = None

    def _before(self, layer: int, first: bool, name: str, module: Any, *call: Any) -> None:
        if self.armed == layer:
            self._record(first, name, call)

    def _after(self, layer: int, last: bool, module: Any, args: Any, output: Any) -> None:
        if self.armed == layer:
            self._record_output(last, output)

    @property
    def _is_wanted(self) -> bool:
        """Whether this is the forward that is to be recorded (a validation pass is not)."""
        mode = self._training in (None, self._model.training)
        return mode and not self._done and torch.is_grad_enabled()

    @torch._disable_dynamo  # not torch.compiler.disable, which would import the compiler at once
    def _record(self, first: bool, name: str, call: tuple[Any, dict[str, Any]]) -> None:
        """Copy the arguments' first rows, or note which earlier output they are."""
        if not self._is_wanted:
            return
        if first:
            self._forget()
        args, kwargs = call
        kwargs = {k: None if k in _STATEFUL_ARGUMENTS else v for k, v in kwargs.items()}
        leaves, spec = tree_flatten((args, kwargs))
        found = {number: self._wire(leaf) for number, leaf in enumerate(leaves)}
        wires = {number: wire for number, wire in found.items() if wire is not None}
        if not wires:
            # Something between the two modules is not a module (a functional ReLU, an addition).
            # The layer is judged from here on; what lies before cannot be run again by itself.
            self._forget()
            tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
            tensors.sort(key=lambda x: not x.is_floating_point())
            self._batch = len(tensors[0]) if tensors else 0
        kept = [None if n in wires else self._keep(leaf) for n, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(kept, spec)
        self._probe.calls.append(Call(name, args, kwargs, wires))

    @torch._disable_dynamo
    def _record_output(self, last: bool, output: Any) -> None:
        """Remember the output for wiring; the last module's shows whether it can be compared."""
        if not self._is_wanted or not self._probe.calls:
            return
        leaves = tree_leaves(output)
        self._outputs.append([(leaf, getattr(leaf, "_version", 0)) for leaf in leaves])
        if last:
            self._probe.num_rows = min(self._batch, self.num_rows)
            self._done = first_activation(output, self._batch) is not None
            self._outputs.clear()

    def _wire(self, leaf: Any) -> tuple[int, int] | None:
        """Return which call returned a leaf, and as which of its leaves."""
        for call, outputs in enumerate(self._outputs):
            for number, (output, version) in enumerate(outputs):
                # The same object, and not written to in between (an in-place ReLU).
                if isinstance(leaf, Tensor) and output is leaf and version == leaf._version:
                    return call, number
        return None

    def _keep(self, leaf: Any) -> Any:
        """Copy: the module, or the one after it, may write into this tensor in place."""
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        return (leaf[: self.num_rows] if leaf.shape[:1] == (self._batch,) else leaf).clone()


Weights = list[dict[str, Tensor]]
"""Parameters and buffers (persistent or not) of each module, by name."""


def copy_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return copies in inference mode, without gradients or hooks, on the host."""
    # Buffers are copied by operators of tensors: storages are copied by none that every device has.
    buffers = [b for module in modules for b in module.buffers() if runs_late(b.device)]
    with without_hooks(modules):
        copies = copy.deepcopy(list(modules), {id(buffer): buffer.clone() for buffer in buffers})
    for module in copies:
        FrozenPrefix.thaw(module)
        module.eval().requires_grad_(False).cpu().zero_grad()
    return copies


@torch.no_grad()
def copy_weights(modules: Sequence[nn.Module]) -> Weights:
    """Return the modules' weights as they are now, on the host.

    From an accelerator the copies are only started where it has pinned memory and streams: wait for
    a `mark` of the device before reading them.
    """
    named = [(*module.named_parameters(), *module.named_buffers()) for module in modules]
    return [{name: to_host(tensor) for name, tensor in own} for own in named]


@torch.no_grad()
def load_weights(modules: Sequence[nn.Module], weights: Weights) -> None:
    """Write `copy_weights` back into modules of the same structure."""
    for module, values in zip(modules, weights, strict=True):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(values[name])
