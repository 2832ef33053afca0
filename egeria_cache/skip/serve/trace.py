"""What a run of the prefix reads and draws, seen below autograd: every operator passes here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from egeria_cache.pystate import PLAIN, RandomState
from egeria_cache.skip.model.frozen import Named
from egeria_cache.skip.serve.placeholder import innermost_module, is_factory

_ATEN = torch.ops.aten
_OF_MODULES = "_parameters", "_buffers", "_modules"
_PAST_OPERATORS = {
    Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.numpy,
    Tensor.__array__, Tensor.__dlpack__,
    *(getattr(Tensor, name).__get__ for name in ("_version", "grad")),
}  # fmt: skip


class PrefixTrace(TorchDispatchMode):
    """Note which of the model's tensors are read, and every draw of random numbers.

    Args:
        known: Tensors to look for, with what the model that runs has in their place; what lies in
            the memory of one counts as the tensor itself.
        names: Names of the modules by id.
        grad: Whether autograd records in this run, but where the model's code turns it off.
    """

    def __init__(
        self, known: Sequence[tuple[Named, Tensor]], names: Mapping[int, str], *, grad: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._grad = grad
        self._known: dict[Any, list[tuple[Named, range]]] = {}
        for named, tensor in known:
            if tensor.numel():
                self._known.setdefault(_address(tensor), []).append((named, bytes_of(tensor)))
        self._made: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By id: what was made of trained tensors alone, or is detached, which keeps it, and of
        which."""
        self.at = -1
        """The step that runs; -1 is code between the steps."""
        self.read: dict[int, set[int]] = {}
        """Id of each tensor read -> the steps that read it."""
        self.undifferentiated: dict[int, set[int]] = {}
        """The same for tensors that are trained, where autograd does not follow what is read: they
        are detached, compared, read into Python, or used under `no_grad`."""
        self.draws: dict[int, str] = {}
        """Step that draws random numbers -> what is to be said of that."""
        self.operators: dict[str, Any] = {}
        """Those of the user's own, by name."""
        self.dtypes = set[torch.dtype]()
        """Those of all tensors that took part."""
        self.branches = False
        """Whether values were read into Python, where they may decide what runs."""
        self.noted = set[tuple[int, str]]()
        """(id of a module that is not skipped, attribute of it that is read)."""
        self.really = set[tuple[int, str]]()
        """Those of the model itself, where a global leads to it and not to the copy that ran."""
        self.is_blind = False
        """Whether code is compiled that cannot be watched: nothing was noted but attributes."""
        self.until: dict[CodeType, int] = {}
        """Offset of the call, in code around the boundary that ran once, that this returns from."""

    def _sources(self, tensor: Tensor) -> list[Tensor]:
        """Return the trained tensors that a tensor was made of, and nothing else."""
        is_trained = tensor.requires_grad and tensor.is_leaf
        return self._made.get(id(tensor), (tensor, [tensor] if is_trained else []))[1]

    def note(self, tensor: Tensor, *, is_followed: bool) -> None:
        """A tensor is read; note it, or what it was made of, if that is the model's."""
        behind = [] if is_followed else leaves_behind(tensor)
        for one in self._sources(tensor) or [tensor, *behind]:
            found = self._known.get(_address(one), ())
            taken = bytes_of(one) if len(found) > 1 else range(0)
            for named, lies in found:
                if len(found) > 1 and (taken.stop <= lies.start or lies.stop <= taken.start):
                    continue  # another one of the same storage: parameters that are made flat
                self.read.setdefault(id(named[2]), set()).add(self.at)
                if named[2].requires_grad and not is_followed:
                    self.undifferentiated.setdefault(id(named[2]), set()).add(self.at)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace what is done inside the block."""
        with _Memory(self), self:
            yield

    def _is_followed(self, func: Any, tensor: Tensor, made: Sequence[Tensor]) -> bool:
        """Whether autograd knows what an operator has made of a trained tensor."""
        if func is _ATEN.detach.default or is_factory(func):
            return True  # who reads what is detached is seen: autograd does so itself
        if not tensor.requires_grad or (self._grad and not torch.is_grad_enabled()):
            return False
        is_read = torch.Tag.data_dependent_output in func.tags
        return not is_read and any(one.is_floating_point() or one.is_complex() for one in made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tensors_in((args, kwargs := kwargs or {}))
        sources = list(map(self._sources, given))
        if func is _ATEN.detach.default:
            sources = [sources[0] or leaves_behind(given)]
        self.dtypes.update(tensor.dtype for tensor in given)
        if (own := OPDEFS.get(func._schema.name)) is not None:
            self.operators[func._schema.name] = own
        self.branches |= _shows_values(func, given)
        has_own = any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values()))
        may_draw = torch.Tag.nondeterministic_seeded in func.tags and not has_own
        # Attention kernels carry the tag, too, and draw nothing without dropout: see what happens.
        before = RandomState.now() if may_draw else None
        result = func(*args, **kwargs)
        made = tensors_in(result)
        for tensor in given:
            self.note(tensor, is_followed=self._is_followed(func, tensor, made))
        if before is not None and not RandomState.now().equals(before):
            module = innermost_module(self._names) or "the model"
            told = (
                f"the code of {module!r} draws random numbers ({func}) before the boundary; keep "
                "that module in inference mode, or set its dropout or noise to zero"
            )
            self.draws.setdefault(self.at, told)
        if sources and all(sources):
            self._made |= {id(one): (one, [*chain(*sources)]) for one in made}
        return result


def _shows_values(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether Python learns something of values, if only how many there are of a kind."""
    if func is _ATEN.index.Tensor:
        return any(one.dtype in (torch.bool, torch.uint8) for one in given[1:])
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return any(tag in func.tags for tag in tags)


class _Memory(TorchFunctionMode):
    """Sees what is read past all operators: as a list, or by its address."""

    def __init__(self, trace: PrefixTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PAST_OPERATORS:
            self._trace.branches = True
            self._trace.note(args[0], is_followed=False)
        return func(*args, **(kwargs or {}))


def known_tensors(model: nn.Module) -> list[Named]:
    """Return parameters, buffers, and tensors kept as plain attributes, or by modules there."""
    found: dict[int, Named] = {}
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        own = {k: v for k, v in vars(module).items() if not (k in _OF_MODULES or type(v) in PLAIN)}
        for key, value in (*module._parameters.items(), *module._buffers.items(), *own.items()):
            for leaf in tree_leaves(value):
                # A module in a list, say, is no child.
                inside = isinstance(leaf, nn.Module)
                for one in (*leaf.parameters(), *leaf.buffers()) if inside else (leaf,):
                    if isinstance(one, Tensor):
                        found.setdefault(id(one), (dot + key, module, one))
    return list(found.values())


def leaves_behind(output: Any, seen: set[Any] | None = None) -> list[Tensor]:
    """Return the leaf tensors that gradients of `output` would flow to.

    Args:
        output: Tensors, in any structure.
        seen: Nodes of autograd's graph that are passed over; those of this output join them.
    """
    seen = set() if seen is None else seen
    pending = [leaf.grad_fn for leaf in tensors_in(output)]
    found: list[Tensor] = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.append(variable)
        pending.extend(following for following, _ in node.next_functions)
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # no storage: a subclass, or a sparse tensor
        return id(tensor)


def bytes_of(tensor: Tensor) -> range:
    """Return where a tensor lies in its storage, from its first element to its last."""
    if not tensor.numel() or tensor.layout != torch.strided:
        return range(0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return range(first * size, (first + last + 1) * size)
