"""Where a model might be cut: its blocks, and before which of them nothing trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from egeria_cache.pystate import names_in, reached
from egeria_cache.skip.model.calls import CallRecord, Recorder
from egeria_cache.skip.serve.trace import leaves_behind, tensors_in


def frozen_cut_points(
    model: nn.Module, recorder: Recorder, given: Iterable[Tensor] = ()
) -> list[str]:
    """Return where the model might be cut now, deepest first: into none of them anything that
    trains leads, as autograd shows.

    Args:
        model: The model.
        recorder: Has seen one forward with autograd recording, and kept the outputs.
        given: What that was called with: a gradient that is asked of an input trains nothing.
    """
    names = {id(module): name for name, module in model.named_modules()}
    outputs = [tensors_in(call.output) for call in recorder.calls]
    made_here = {id(leaf) for leaves in (*outputs, tensors_in(list(given))) for leaf in leaves}
    frozen = []
    for i, call in enumerate(recorder.calls):
        if call.end < 0 or id(call.module) not in names or not outputs[i]:
            continue
        steps, _ = recorder.before(i)
        has_frozen = any(not p.requires_grad for step in steps for p in step.module.parameters())
        if not has_frozen or any(p.requires_grad for p in call.module.parameters()):
            continue
        if ends_in_training(steps):
            continue
        # A hook may ask for a gradient of an output (`enable_input_require_grads`): nothing trains.
        if all(id(leaf) in made_here for leaf in leaves_behind(outputs[i])):
            frozen.append(i)
    frozen.sort(key=lambda i: recorder.calls[i].end)
    known = set(blocks(model))
    modules = [call.module for call in recorder.calls]
    chosen = _worthwhile([i for i in frozen if names[id(modules[i])] in known], modules)
    return list(dict.fromkeys(names[id(modules[i])] for i in reversed(chosen or frozen)))


def _worthwhile(chosen: list[int], modules: list[nn.Module]) -> list[int]:
    """Leave out what a norm, or a module without parameters, follows: behind the ReLU and the
    pooling more is skipped and less is stored.
    """
    joins = [
        isinstance(modules[i], _NORMS) or next(modules[i].parameters(), None) is None
        for i in chosen
    ]
    return [i for i, joined in zip(chosen, [*joins, False][1:], strict=True) if not joined]


def ends_in_training(steps: Iterable[CallRecord]) -> bool:
    """Whether a front of these steps would end with one that trains although it has no parameter.

    The front is what is frozen and what lies between. Nobody has frozen a norm without parameters,
    or a dropout, that comes behind the last frozen parameter: in training mode it goes on updating
    its statistics, or drawing, whatever stands before it.
    """
    for step in reversed(list(steps)):
        if next(step.module.parameters(), None) is not None:
            return False
        if any(map(_changes_in_training, step.module.modules())):
            return True
    return False


def _changes_in_training(module: nn.Module) -> bool:
    """Whether it keeps something of its own, or does something else while it trains."""
    code = getattr(type(module).forward, "__code__", None)  # PyTorch's own is not followed
    own = names_in(code).all if code is not None else ()
    return bool(module._buffers) or "training" in {*own, *reached([module]).names}


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def holds_stage(module: nn.Module) -> bool:
    """Whether a list inside has two or more composite members of one class.

    A block whose shortcut is `Sequential(conv, norm)` has none, and stays whole.
    """
    for inner in filter(_is_list, module.modules()):
        kinds = [
            type(child)
            for child in inner.children()
            if not _is_list(child) and any(True for _ in child.children())
        ]
        if len(kinds) > len(set(kinds)):
            return True
    return False


def blocks(
    module: nn.Module, prefix: str = "", *, opens: Callable[[nn.Module], bool] = holds_stage
) -> Iterator[str]:
    """Yield the names of the members of a model's lists, and of what lies between the lists.

    Args:
        module: The model.
        prefix: What its names begin with.
        opens: Whether a member of a list is a stage, whose own members are meant.
    """
    listed = _is_list(module)
    for name, child in module.named_children():
        if _is_list(child) or (opens(child) if listed else _holds_list(child)):
            yield from blocks(child, f"{prefix}{name}.", opens=opens)
        else:
            yield prefix + name


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _holds_list(module: nn.Module) -> bool:
    """Whether a list of two or more members with parameters lies anywhere inside."""
    return any(
        sum(any(True for _ in child.parameters()) for child in inner.children()) >= 2
        for inner in module.modules()
        if _is_list(inner)
    )
