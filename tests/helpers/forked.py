"""Processes of their own for a fraction of the price: forked where torch is imported already.

`started(code, *arguments)` stands for `subprocess.Popen([sys.executable, "-c", code, *arguments])`
with a pipe for stdout, except that nothing runs when the interpreter ends (`atexit`).
"""

from __future__ import annotations

import os
import sys
import textwrap
import types
from multiprocessing import context as contexts
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TextIO

__all__ = ["Started", "nursery", "started"]

_PRELOADED = ["torch", "torch.distributed.fsdp", "egeria_cache", "egeria_core"]


def nursery() -> contexts.ForkServerContext:
    """Return the context whose processes share one import of torch."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class Started:
    """A program that runs, or has run."""

    def __init__(self, code: str, arguments: tuple[str, ...]) -> None:
        reader, writer = nursery().Pipe(duplex=False)
        self._process = nursery().Process(
            target=_main, args=(textwrap.dedent(code), arguments, writer), daemon=True
        )
        self._process.start()
        writer.close()
        self.stdout: TextIO = os.fdopen(os.dup(reader.fileno()))
        reader.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        """Kill it as nothing else does: SIGKILL."""
        self._process.kill()

    def result(self, timeout_s: float = 120) -> str:
        """Wait for its end; return what it printed and was not read yet.

        Raises:
            AssertionError: It failed, or was not done in time.
        """
        with self.stdout:
            text = self.stdout.read()
        self._process.join(timeout_s)
        assert self._process.exitcode == 0, f"exit code {self._process.exitcode}"
        return text

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()
        self.stdout.close()


def started(code: str, *arguments: object) -> Started:
    """Run a program's text as `__main__` in a new process, with its arguments in `sys.argv`."""
    return Started(code, tuple(map(str, arguments)))


def _main(code: str, arguments: tuple[str, ...], out: Connection) -> None:
    os.dup2(out.fileno(), 1)
    out.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<program>", "exec"), main.__dict__)
