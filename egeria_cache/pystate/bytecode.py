"""What code reads beside its arguments: the names that its bytecode loads, not all that it holds.

`co_names` has the names of attributes too: `self.y` says nothing about a global `y`.
"""

from __future__ import annotations

import dis
import functools
import itertools
from itertools import chain
from types import CodeType
from typing import NamedTuple

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_FREE = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


class Names(NamedTuple):
    """Names in some code, and in the functions inside of it, each in the order of the code."""

    loaded: tuple[str, ...]
    """Globals (and builtins) that it reads."""
    stored: tuple[str, ...]
    """Globals that it assigns."""
    free: tuple[str, ...]
    """Variables of closures that it reads."""
    all: tuple[str, ...]
    """Those of attributes and imports as well."""


@functools.lru_cache(maxsize=4096)
def attributes_of(code: CodeType, holder: str) -> frozenset[str]:
    """Return the attributes that `code` asks of what it finds under the attribute `holder`."""
    found, names = list(dis.get_instructions(code)), set[str]()
    for before, one in itertools.pairwise(found):
        both = before.opname + one.opname
        if both.count("LOAD_ATTR") + both.count("LOAD_METHOD") == 2 and before.argval == holder:
            names.add(one.argval)
    inner = [attributes_of(one, holder) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(names).union(*inner)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """Return the names in `code` by what it does with them."""
    found = list(dis.get_instructions(code))
    own = Names(
        tuple(one.argval for one in found if one.opname in _LOADS),
        tuple(one.argval for one in found if one.opname in _STORES),
        tuple(one.argval for one in found if one.opname in _FREE),
        code.co_names,
    )
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return Names(*(tuple(dict.fromkeys(chain(*parts))) for parts in zip(own, *inner, strict=True)))


@functools.lru_cache(maxsize=4096)
def texts_in(code: CodeType) -> tuple[str, ...]:
    """Return the texts in `code`: what it asks for by name, of the environment, say."""
    inner = (texts_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return *(one for one in code.co_consts if type(one) is str), *chain.from_iterable(inner)
