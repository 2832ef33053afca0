"""The content address of a cut: everything that decides what its activations are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from egeria_cache.device import fp32_precision
from egeria_cache.kinds import kind_name
from egeria_cache.pystate import Code, describe, digest, tensor_digest
from egeria_cache.skip.model.frozen import Named
from egeria_cache.skip.model.fsdp import casts_of
from egeria_cache.skip.serve.call import PLAIN, Invocation, autocast_modes, kind_of
from egeria_cache.skip.serve.plan import ReplayPlan
from egeria_cache.skip.state.guards import PrefixGuard
from egeria_cache.skip.state.watch import hooks_of, own_tensors, watched_attributes


def prefix_tensors(plan: ReplayPlan) -> list[Named]:
    """Return (qualified name, owner, tensor) of all that the skipped modules compute with."""
    found: dict[int, Named] = {}
    for name, module in plan.skipped_modules():
        for key, tensor in own_tensors(module):
            found.setdefault(id(tensor), (f"{name}.{key}" if name else key, module, tensor))
    for named in plan.reads:
        found.setdefault(id(named[2]), named)
    return list(found.values())


def address(plan: ReplayPlan, call: Invocation, guard: PrefixGuard, code: Code) -> dict[str, Any]:
    """Return the fields, JSON values that read well when two addresses are compared."""
    paths = call.layout.paths()
    inputs = {}
    for position, (leaf, chain) in sorted(plan.leaf_names.items()):
        tensor = call.leaves[position]
        inputs[paths[position]] = {
            "leaf": leaf,
            "operations": chain,
            "shape": list(call.shape(position)[1:]),
            "dtype": str(tensor.dtype),
        }
    pairs = zip(paths, call.leaves, strict=True)
    plain = {path: one for path, one in pairs if not isinstance(one, Tensor)}
    arguments = {p: repr(x) if isinstance(x, PLAIN) else digest(x) for p, x in plain.items()}
    arguments |= {paths[i]: f"any {kind_of(call.leaves[i])}" for i in plan.free}
    weights = "".join(f"{name}={content};" for name, content in guard.contents())
    pinned = {paths[i]: tensor_digest(tensor) for i, tensor in plan.pinned.items()}
    specs = {name: plan.tensor_spec(slot) for name, slot in plan.slots().items()}
    shapes: dict[str, list[Any]] = {name: list(spec.row.shape) for name, spec in specs.items()}
    for name, growth in plan.row_growth().items():
        for dim, _ in growth.dims:
            shapes[name][dim] = "length"
    odd: dict[str, Any] = {} if plan.grad_mode is None else {"gradients": plan.grad_mode}
    if plan.numbers:  # that they are there
        odd["numbers"] = sorted(f"{plan.names.get(id(m), '')}.{key}" for m, key in plan.numbers)
    if (precision := str(fp32_precision())) != "highest":
        odd["precision"] = precision
    return odd | {
        "boundary": plan.boundary, "weights": xxhash.xxh3_128_hexdigest(weights.encode()),
        "structure": _structure(plan), "code": code.digest(),
        "inputs": inputs, "arguments": arguments | pinned,
        "mode": ["train" if training else "eval" for training in plan.modes],
        "autocast": [[kind, str(dtype)] for kind, dtype in autocast_modes()],
        "default_dtype": str(torch.get_default_dtype()),
        "tensors": {
            name: {"shape": shapes[name], "dtype": str(spec.dtype), "order": list(spec.order)}
            for name, spec in specs.items()
        },
        "device": next(iter(specs.values())).device.type,
        "torch": torch.__version__.partition("+")[0],
    }  # fmt: skip


def _structure(plan: ReplayPlan) -> str:
    """Hash the modules' kinds and settings: equal weights may be used in different ways."""
    total, known = xxhash.xxh3_128(), dict[int, bytes]()
    for name, module in plan.skipped_modules():
        kind = kind_name(type(module))
        total.update(f"{name}:{kind}({module.extra_repr()});".encode())
        total.update(_settings(watched_attributes(module), known))
    modules = [module for _, module in plan.skipped_modules()]
    for hook in [*hooks_of(modules), *casts_of(modules)]:
        total.update(_settings({"hook": getattr(hook, "__self__", hook)}, known))
    for name, module, keys in plan.around():
        own = vars(module)
        values = {key: own[key] for key in sorted({*keys} - {"_modules"}) if key in own}
        total.update(f"{name}:".encode() + _settings(values, known))
    return total.hexdigest()


def _settings(values: Mapping[str, Any], known: dict[int, bytes]) -> bytes:
    """Describe attributes; a configuration that many modules share is read once."""
    parts = []
    for key, value in values.items():
        if id(value) not in known:
            known[id(value)] = describe(value)
        parts.append(key.encode() + b"=" + known[id(value)])
    return b";".join(parts)
