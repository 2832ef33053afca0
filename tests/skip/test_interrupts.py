"""Ctrl-C at any line: in the middle of a step, and of taking over a module's calls."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import egeria_cache
from egeria_cache.skip.model import calls
from tests.helpers.skip_harness import Harness, assert_same, freeze, step
from tests.skip.test_front import BATCHES, DATA, Net, call, held


@functools.cache
def with_lines(path: str) -> set[int]:
    """The lines on which blocks are entered and left: a tracer's interrupt there would keep a block
    from being left, as one by a signal does not.
    """
    blocks = [
        one for one in ast.walk(ast.parse(Path(path).read_text())) if isinstance(one, ast.With)
    ]
    return {n for one in blocks for n in range(one.lineno, one.body[0].lineno)}


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that runs in these files, and in `contextlib` for
    them; counts without one.
    """

    def __init__(self, number: int | None = None, files: tuple[str, ...] = ()) -> None:
        self.number, self.count = number, 0
        self.files = files or (calls.__file__,)

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        file = frame.f_code.co_filename
        if file == contextlib.__file__:  # whose block it is
            file = frame.f_back.f_code.co_filename
        if not file.startswith(self.files):
            return None
        if event == "line" and frame.f_lineno not in with_lines(frame.f_code.co_filename):
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
# The interrupt may come within a callback of the garbage collector, where nobody can catch it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_after_an_interrupted_one_is_as_if_there_had_been_none(count):
    rng, num_interrupted, ours_alone = random.Random(count), 0, egeria_cache.__path__[0]
    for trial in range(count):
        if trial % 10 == 0:
            torch.manual_seed(0)
            model = Net().train()
            model.encoder.drop = 0
            freeze(model, "encoder.layers.0", "encoder.layers.1")
            plain = copy.deepcopy(model)
            held(plain)
            harness = Harness(model, DATA)
            harness.engine.set_boundary("encoder.layers.1")
        ids = BATCHES[trial % 3]
        batch, line = harness.batch(ids), int(10 ** rng.uniform(0, 3 if trial % 10 else 5))
        try:
            with InterruptAt(line, (ours_alone,)):
                step(model, call, batch, trial)
        except KeyboardInterrupt:
            num_interrupted += 1
        torch.set_grad_enabled(True)  # of the test's own step, too
        assert torch._C._is_torch_function_enabled()
        ours = step(model, call, harness.batch(ids), trial)
        assert model.encoder.seen[-2:] == [True, True]  # behind the boundary
        assert_same(ours, step(plain, call, harness.plain(ids), trial), exact=False)
        assert model.training
        assert model.encoder.training
    assert harness.host.refusals == []
    assert num_interrupted > count // 5


def outer(module, original, *args):
    return original(*args)


def inner(module, original, *args):
    return original(*args)


def run(modules: list[nn.Module]) -> None:
    depth = len(calls.LOCAL.active)
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
        calls.LOCAL.active.clear()


def test_what_waits_for_a_module_s_hooks_is_done_by_a_thread_that_has_taken_nothing_over():
    module, done = nn.Identity(), []
    module.register_forward_hook(lambda *_: None)
    calls.when_returned(module, lambda: done.append(module))
    module(None)
    assert done == [module]
