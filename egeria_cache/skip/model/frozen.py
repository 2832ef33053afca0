"""Keep the frozen prefix in inference mode, through every `model.train()`.

`model.train()` at the start of an epoch undoes `.eval()` of a frozen BatchNorm: its running
statistics then move, and every stored activation is stale. `FrozenPrefix` gives each module that it
holds a `train` of its own, which notes what was asked for and leaves the module in inference mode.
It is an ordinary picklable attribute: a copy of the model (`copy.deepcopy`, `torch.save`) is held
like the original, just as it keeps `requires_grad=False`; `FrozenPrefix.thaw(copy)` lets it go.
`state_dict` never sees it. Code of the modules around the boundary is held by
`calls.AroundForward`.

What that changes is said once (`tell_modes`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from operator import attrgetter

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from egeria_cache.pystate import StandIn
from egeria_cache.skip.model.calls import AroundForward, around_of, hold_around

_requires_grad = attrgetter("requires_grad")
_MAX_WAIT = 1024
_ALIKE = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("linear", "conv", "container", "flatten", "pooling", "sparse", "normalization",
                 "activation")
)  # fmt: skip
"""Whose modules do the same in training mode, but for those that `differs_in_training` knows."""
Named = tuple[str, nn.Module | None, Tensor]
"""(qualified name, owner, tensor)"""
log = logging.getLogger("egeria.modes")


class _HeldTrain(StandIn):
    """Stands in for one module's `train`; shared by all that hold this module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.wanted = module.training
        self.num_holders = 0
        self.keeps_flag = False
        """Whether the module's own flag says what was asked for, because it leads others, which
        train: `nn.TransformerEncoder` takes all of its layers down another path, of nested tensors,
        where its first one is in inference mode. The flag of a layer itself draws nothing.
        """

    def __call__(self, mode: bool = True) -> nn.Module:
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self.wanted = mode
        self.module.training = mode and self.keeps_flag
        for child in self.module.children():
            # A child that joined after the freeze has no holder of its own.
            child.train(mode and _held(child) is not None)
        return self.module

    def let_go(self) -> None:
        """Give the module back its own `train`, and the mode it would have had without us."""
        if _held(self.module) is self:
            del self.module.__dict__["train"]
        self.module.training = self.wanted


def _held(module: nn.Module) -> _HeldTrain | None:
    train = module.__dict__.get("train")
    return train if isinstance(train, _HeldTrain) else None


def mode_asked_for(module: nn.Module) -> bool:
    """Whether the module would be in training mode if nobody held it."""
    held = _held(module)
    return module.training if held is None else held.wanted


class FrozenPrefix:
    """Hold modules, with all that is below them, in inference mode until `release()`.

    Args:
        modules: Whole subtrees: BatchNorm stops updating its statistics and normalises with the
            stored ones, Dropout passes its input on.
        model: Of which they are parts, if it is to run on beside them.

    Several holders may overlap; a module returns to training mode when the last one lets go, and
    then takes the mode that the latest `train()` or `eval()` asked for. Not thread-safe: call it
    where `model.train()` is called.
    """

    def __init__(
        self, modules: Iterable[nn.Module] = (), *, model: nn.Module | None = None
    ) -> None:
        self._model = model
        self.modules: dict[int, nn.Module] = {}
        """All that are held, by id."""
        self.boundary: nn.Module | None = None
        """Until which `around` are held."""
        self._around: dict[int, AroundForward] = {}
        self.extend(modules)

    def extend(self, modules: Iterable[nn.Module]) -> None:
        """Hold further modules, with all that is below them; those held already are put back into
        inference mode.
        """
        for root in modules:
            for module in root.modules():
                if id(module) in self.modules:
                    continue
                held = _held(module) or _HeldTrain(module)
                held.num_holders += 1
                if self._model is not None and isinstance(module, nn.TransformerEncoderLayer):
                    kind, every = nn.TransformerEncoder, self._model.modules()
                    around = [m for m in every if isinstance(m, kind) and m.layers[0] is module]
                    held.keeps_flag = any(p.requires_grad for m in around for p in m.parameters())
                module.__dict__["train"] = held
                self.modules[id(module)] = module
        self.put_back()

    def put_back(self) -> None:
        """Put every held module back into inference mode, whoever set its flag."""
        for module in self.modules.values():
            held = _held(module)
            if module.training and not (held is not None and held.keeps_flag):
                module.training = False

    def extend_around(self, boundary: nn.Module, modules: Iterable[nn.Module]) -> bool:
        """Hold the own code of modules, without what is below them, until `boundary` returns.

        Args:
            boundary: The last frozen module. Those held for another one are let go.
            modules: Modules that are running when the boundary returns, and whose own code before
                that draws random numbers.

        Returns:
            Whether one was not held before.
        """
        if boundary is not self.boundary:
            self._let_go_around()
            self.boundary = boundary
        before = len(self._around)
        for module in modules:
            around = None if id(module) in self._around else hold_around(module, boundary)
            if around is not None:
                self._around[id(module)] = around
        return len(self._around) > before

    @property
    def around(self) -> list[nn.Module]:
        """The modules whose own code is held until `boundary` returns."""
        return [around.module for around in self._around.values()]

    def _let_go_around(self) -> None:
        for around in self._around.values():
            around.let_go(self.boundary)
        self._around, self.boundary = {}, None

    def release(self) -> None:
        """Let every module go; may be called twice."""
        self._let_go_around()
        for key, module in list(self.modules.items()):
            held = _held(module)
            if held is not None:  # else thawed meanwhile
                held.num_holders -= 1
                if held.num_holders <= 0:
                    held.let_go()
            del self.modules[key]  # one by one: what is interrupted is finished by the next call

    @staticmethod
    def thaw(model: nn.Module) -> None:
        """Let go every held module of `model`, whoever holds it: for copies of a frozen model."""
        for module in model.modules():
            for holder in (_held(module), around_of(module)):
                if holder is not None:
                    holder.let_go()

    def __contains__(self, module: object) -> bool:
        return id(module) in self.modules

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.modules.values())

    def __enter__(self) -> FrozenPrefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RequiresGradWatch:
    """Watches `requires_grad` of what is frozen: 40 ns a tensor and batch."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Which are frozen, as far as is known."""
        self._thawed: list[Tensor] = []
        self._wait = self._num_still = 0

    def watch(self, held: FrozenPrefix, reads: Iterable[Named] = ()) -> None:
        """Watch the frozen parameters of all held modules, and what code around them reads."""
        found = [tensor for *_, tensor in reads]
        found += [one for module in held for one in module._parameters.values() if one is not None]
        self.tensors = list({id(one): one for one in found if not one.requires_grad}.values())

    def thawed(self, model: nn.Module) -> str:
        """Name one of them that is to be trained from now on; they are no longer watched then."""
        moved = [tensor for tensor in self.tensors if tensor.requires_grad]
        self.tensors = [tensor for tensor in self.tensors if not tensor.requires_grad]
        self.note(moved)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return names.get(id(moved[0]), "a tensor of the front")

    def note(self, tensors: Iterable[Tensor]) -> None:
        """These were thawed; they are watched no longer."""
        self._thawed += tensors
        # Who thaws and freezes in turns (a generator and its critic) is waited for ever longer.
        self._wait, self._num_still = min(2 * self._wait + 1, _MAX_WAIT), 0

    def is_frozen_again(self) -> bool:
        """Whether nothing of what was thawed has been trained for a while."""
        is_trained = any(map(_requires_grad, self._thawed))
        self._num_still = 0 if is_trained else self._num_still + 1
        return self._num_still > self._wait

    def forget(self) -> None:
        """What was thawed before does not matter any more."""
        self._thawed = []


def tell_modes(model: nn.Module, held: FrozenPrefix) -> bool:
    """Say so if modules of the front that were in training mode do something else now.

    Args:
        model: The model, as its user names its parts.
        held: The front.

    Returns:
        Whether there was something to say.
    """
    names = {id(module): name for name, module in model.named_modules()}
    around = [module for module in held.around if module.training and id(module) in names]
    if around:
        boundary = names.get(id(held.boundary), "")
        log.warning(
            "the code of %s draws random numbers in training mode before %r returns; until then "
            "it is in inference mode from now on. A run without a cache trains the same if it has "
            "this line here: egeria_cache.FrozenPrefix().extend_around(model.get_submodule(%r), "
            "map(model.get_submodule, %s))",
            ", ".join(type(module).__name__ for module in around), boundary, boundary,
            [names[id(module)] for module in around],
        )  # fmt: skip
    asked = (module for module in held if mode_asked_for(module))
    changed = {id(m): type(m).__name__ for m in asked if differs_in_training(m)}
    if not changed:
        return bool(around)
    tops, covered = list[str](), set[int]()
    for name, module in model.named_modules():  # what holds others comes first
        below = {id(inner) for inner in module.modules()}
        if module in held and id(module) not in covered:
            covered |= below
            tops += [name] if changed.keys() & below else []
    log.warning(
        "the frozen front runs in inference mode from now on, whatever model.train() says: %d of "
        "its modules (%s) would do something else in training mode. A run without a cache trains "
        "the same if it has this line here: egeria_cache.FrozenPrefix(map(model.get_submodule, "
        "%s))",
        len(changed), ", ".join(dict.fromkeys(changed.values())), tops,
    )  # fmt: skip
    return True


def are_alike(modules: Iterable[nn.Module]) -> bool:
    """Whether modules are known to do the same in training mode."""
    return all(
        type(module).__module__ in _ALIKE
        and not isinstance(module, nn.MultiheadAttention)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not differs_in_training(module)
        for module in modules
    )


def differs_in_training(module: nn.Module) -> bool:
    """Whether a module itself does something else in training mode."""
    if isinstance(module, _NormBase):
        return module.track_running_stats
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, nn.RReLU | _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )
