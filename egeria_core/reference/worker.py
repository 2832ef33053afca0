"""The evaluator process: `python -m egeria_core.reference.worker`, started by `ProcessEvaluator`.

It takes evaluations from a pipe, runs layer and reference and sends the plasticity back, with what
the machine has left over. When the training process goes away, so does this one.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from egeria_core.config import ReferenceKind
from egeria_core.reference.evaluators import receive
from egeria_core.reference.references import ReferenceRunner

CPU_SHARE = 4
"""A quarter of the machine's CPUs are its own."""


class MainModule(ModuleType):
    """Stands for the training script's `__main__`, which is not run unless a model needs a class.

    A script without an `if __name__ == "__main__"` guard would train a second time here: such
    classes cannot be had, and the evaluation fails with a clear error.
    """

    def __init__(self, path: str) -> None:
        super().__init__("__main__")
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries ask for `__file__`
            raise AttributeError(name)
        source = Path(self._path) if self._path else None
        if source is None or not source.is_file() or "__name__" not in source.read_text():
            raise AttributeError(
                f"{name} is defined in __main__, which cannot be imported; define it in a "
                "module of its own, or guard the script with if __name__ == '__main__'"
            )
        names = runpy.run_path(self._path, run_name="__egeria_main__")
        self.__dict__.update(names)
        return names[name]


def serve(pipe: Connection, kind: ReferenceKind) -> None:
    """Answer evaluations until the training side hangs up or one fails; in any thread or process.

    Args:
        pipe: Where evaluations come from, and verdicts go. An exception's text goes there too.
        kind: Reference to use.
    """
    runner = ReferenceRunner(kind)
    try:
        while True:
            pipe.send(runner.run(receive(pipe)))
    except (EOFError, OSError):
        return
    except Exception as error:  # any model code may run here
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")


def main(argv: list[str]) -> int:
    """Serve on the file descriptor given; see `ProcessEvaluator`."""
    fd, kind, main_path = argv
    # It is the first to yield the CPU, and the first that the kernel kills when memory is short.
    with suppress(OSError):
        os.nice(19)
        Path("/proc/self/oom_score_adj").write_text("500")
        if os.getsid(0) == os.getpid():
            # Where sessions share the CPU evenly, it is the session's niceness that counts.
            Path("/proc/self/autogroup").write_text("19")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CPU_SHARE))
    sys.modules["__main__"] = MainModule(main_path)
    serve(Connection(int(fd)), cast(ReferenceKind, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
