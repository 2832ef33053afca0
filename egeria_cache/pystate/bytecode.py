"""What code reads beside its arguments: the names that its bytecode loads, not all that it holds.

`co_names` has the names of attributes too: `self.y` says nothing about a global `y`.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from itertools import chain
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from egeria_cache.pystate.content import describe
from egeria_cache.pystate.objects import is_library

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_BY_TEXT = {
    "globals", "getattr", "hasattr", "setattr", "vars", "modules", "import_module", "__dict__",
    "attrgetter", "methodcaller",
}  # fmt: skip
"""With these, code finds by a text what it names."""
_WHOLE = {"vars", "getattr", "hasattr", "asdict", "astuple", "deepcopy", "attrgetter"}
"""What is given to these is read under names that may be none of the code's."""
_FREE = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_OF_ALL = {"globals", "eval", "exec"}
"""With these, code reads globals that it does not name."""


class Names(NamedTuple):
    """Names in some code, and in the functions inside of it, each in the order of the code."""

    loaded: tuple[str, ...]
    """Globals (and builtins) that it reads."""
    stored: tuple[str, ...]
    """Globals that it assigns."""
    free: tuple[str, ...]
    """Variables of closures that it reads."""
    all: tuple[str, ...]
    """Those of attributes and imports as well, and texts where code finds things by them."""
    imports: tuple[str, ...]
    """Modules that it imports itself, or may find by a text."""
    whole: tuple[str | None, ...]
    """Names of what it may read all of; "" stands for its globals, None for what cannot be told."""


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType, call: int | None = None) -> Names:
    """Return the names in `code` by what it does with them.

    Args:
        code: What a function runs.
        call: Offset of a call in it: what can only be run behind that counts no longer.
    """
    found = list(dis.get_instructions(code))
    if call is not None and _is_straight(found, call):
        found = [one for one in found if one.offset <= call]
        waiting = _waiting(found)
        found = [one for one in found if one.offset not in waiting]
    named = [one.argval for one in found if one.opcode in dis.hasname]
    by_text = [] if _BY_TEXT.isdisjoint(named) else [one.argval for one in found]
    texts = tuple(text for text in by_text if type(text) is str)
    parts = [part for text in texts if "attrgetter" in named for part in text.split(".")]
    own = Names(
        tuple(one.argval for one in found if one.opname in _LOADS),
        tuple(one.argval for one in found if one.opname in _STORES),
        tuple(one.argval for one in found if one.opname in _FREE),
        (*named, *texts, *parts),
        (*(one.argval for one in found if one.opname == "IMPORT_NAME"), *texts),
        tuple(_wholes(found)),
    )
    inner = [names_in(one.argval) for one in found if isinstance(one.argval, CodeType)]
    return Names(*(tuple(dict.fromkeys(chain(*parts))) for parts in zip(own, *inner, strict=True)))


def _wholes(found: list[dis.Instruction]) -> Iterator[str | None]:
    """Yield what is read under names that cannot be told."""
    found = [one for one in found if one.opname not in ("CACHE", "PUSH_NULL", "NOP")]
    for i, one in enumerate(found):
        if one.opcode not in dis.hasname or not one.opname.startswith("LOAD_"):
            continue
        if one.argval in ("__dict__", "__getattribute__"):
            yield _root(found[:i][::-1], -1)
        elif one.argval in _OF_ALL:
            yield ""
        elif one.argval in _WHOLE and not _gives_a_text(found[i:]):
            yield _root(found[i + 1 :], 0)


def _root(found: list[dis.Instruction], at: int) -> str | None:
    """Return the variable that is read first, or last, and not an attribute of it."""
    one, *then = found[: 2 if at == 0 else 1]
    if any(each.opname in ("LOAD_ATTR", "LOAD_METHOD") for each in (one, *then)):
        return None
    if not one.opname.startswith("LOAD_") or one.opname == "LOAD_CONST":
        return None
    name = one.argval[at] if isinstance(one.argval, tuple) else one.argval
    return name if isinstance(name, str) else None


def _gives_a_text(found: list[dis.Instruction]) -> bool:
    """Whether what is given behind a first argument that has a name is a text, as it stands."""
    loads = list(itertools.takewhile(lambda one: one.opname.startswith("LOAD_"), found[1:]))
    is_called = any("CALL" in one.opname for one in found[1 + len(loads) :][:2])
    given = next((one for one in loads if one.opname == "LOAD_CONST"), None)
    return is_called and given is not None and type(given.argval) is str


def _is_jump(one: dis.Instruction) -> bool:
    return one.opcode in dis.hasjrel or one.opcode in dis.hasjabs


def _is_straight(found: list[dis.Instruction], call: int) -> bool:
    """Whether the call is the only way to what is behind it, and nothing leads back."""
    names, jumps = [one.opname for one in found], filter(_is_jump, found)
    catches = names.count("PUSH_EXC_INFO") != names.count("WITH_EXCEPT_START")
    return not catches and all((one.offset <= call) is (one.argval <= call) for one in jumps)


def _waiting(found: list[dis.Instruction]) -> set[int]:
    """Return where a name is looked up that nothing makes use of, not the last of these either: a
    function that is given what the call brings.
    """
    waiting, height = dict[int, int](), 0
    for one in found:
        is_load, is_named = one.opname.startswith("LOAD_"), one.opcode in dis.hasname
        top, height = height, height + dis.stack_effect(one.opcode, one.arg, jump=False)
        if _is_jump(one) or one.opname in ("SWAP", "COPY") or one.opname.startswith("ROT_"):
            waiting.clear()
        elif not ((is_load and not is_named) or one.opname in ("LOAD_GLOBAL", "PUSH_NULL")):
            waiting = {at: level for at, level in waiting.items() if level < min(top, height)}
        if is_load and is_named:
            waiting[one.offset] = height
    return {at for at, level in waiting.items() if level < height}


@functools.lru_cache(maxsize=4096)
def code_text(code: CodeType) -> bytes:
    """Return what a code object does, without where it stands."""
    constants = (
        code_text(one) if isinstance(one, CodeType) else describe(one) for one in code.co_consts
    )
    names = repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags)).encode()
    return b"|".join((code.co_code, names, b",".join(constants)))


@functools.lru_cache(maxsize=4096)
def texts_in(code: CodeType) -> tuple[str, ...]:
    """Return the texts in `code`: what it asks for by name, of the environment, say."""
    inner = (texts_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return *(one for one in code.co_consts if type(one) is str), *chain.from_iterable(inner)


def globals_of(function: FunctionType) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return the globals that a function reads or assigns, also by a text: (where, names); and
    those that it names of the user's modules.
    """
    names, scope = names_in(function.__code__), function.__globals__
    texts = (text for text in names.imports if text in scope)
    own = dict.fromkeys((*names.loaded, *names.stored, *texts))
    found = [(scope, tuple(own))] if own else []
    closed = (c.cell_contents for c in function.__closure__ or () if c != CellType())  # not empty
    for module in (*map(scope.get, own), *map(sys.modules.get, names.imports), *closed):
        if isinstance(module, ModuleType) and not is_library(module.__name__):
            inner = vars(module)
            found.append((inner, tuple(name for name in names.all if name in inner)))
    return found
