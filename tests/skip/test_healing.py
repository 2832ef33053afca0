"""An interrupt at every line of taking over and giving back a module's calls."""

from __future__ import annotations

import contextlib
import sys

import pytest
from torch import nn

from egeria_cache.skip.model import calls


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that runs in these files; counts without one."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.count = number, 0

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in (calls.__file__, contextlib.__file__):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt
        return self._trace


def outer(module, original, *args):
    return original(*args)


def inner(module, original, *args):
    return original(*args)


def run(modules: list[nn.Module]) -> None:
    depth = calls.depth()
    try:
        with (
            calls.intercept(modules, outer),
            calls.intercept(modules[1:], inner),
            calls.intercept(modules[:2], outer),
        ):
            pass
    except BaseException:
        calls.heal(depth)
        raise


def test_an_interrupt_at_any_line_leaves_no_module_taken_over():
    modules = [nn.Identity() for _ in range(3)]
    own = modules[2].forward
    modules[2].forward = own  # one that already has a forward of its own
    run(modules)  # what is made once per thread
    with InterruptAt() as whole:
        run(modules)
    assert whole.count > 50
    for number in range(1, whole.count + 1):
        with pytest.raises(KeyboardInterrupt), InterruptAt(number):
            run(modules)
        left = ["forward" in vars(module) for module in modules]
        assert left == [False, False, True], f"interrupted at line {number} of {whole.count}"
        assert modules[2].forward is own
        calls._active().clear()
