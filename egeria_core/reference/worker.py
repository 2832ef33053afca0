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
from typing import Any, cast

import torch

from egeria_core.config import ReferenceKind
from egeria_core.reference.runner import ReferenceRunner
from egeria_core.reference.wire import receive

__all__ = ["MainModule", "main", "serve"]


class MainModule:
    """Finds classes of the training script, which is not imported unless a model needs it.

    A script without an `if __name__ == "__main__"` guard would train a second time here: such
    classes cannot be had, and the evaluation fails with a clear error.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: dict[str, Any] | None = None

    def __call__(self, module: str, name: str) -> Any:
        """Return the class of that name."""
        if self._names is None:
            source = Path(self._path) if self._path else None
            if source is None or not source.is_file() or "__name__" not in source.read_text():
                raise AttributeError(
                    f"{name} is defined in __main__, which cannot be imported; define it in a "
                    "module of its own, or guard the script with if __name__ == '__main__'"
                )
            self._names = runpy.run_path(self._path, run_name="__egeria_main__")
        value: Any = self._names[name.split(".")[0]]
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        return value


def serve(pipe: Connection, kind: ReferenceKind, main_path: str = "") -> None:
    """Answer evaluations until the training side hangs up or one fails; in any thread or process.

    Args:
        pipe: Where evaluations come from, and verdicts go. An exception's text goes there too.
        kind: Reference to use.
        main_path: The training script, for classes that are defined in it.
    """
    runner, find = ReferenceRunner(kind), MainModule(main_path)
    try:
        while True:
            pipe.send(runner.run(receive(pipe, find)))
    except (EOFError, OSError):
        return
    except Exception as error:  # any model code may run here
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")


def _step_back() -> None:
    """Be the first to yield the CPU, and the first that the kernel kills when memory is short."""
    with suppress(OSError):
        os.nice(19)
    # Where sessions share the CPU evenly, it is the session's niceness that counts.
    for name, value in (("autogroup", "19"), ("oom_score_adj", "500")):
        with suppress(OSError):
            Path("/proc/self", name).write_text(value)


def main(argv: list[str]) -> int:
    """Serve on the file descriptor given; see `ProcessEvaluator`."""
    fd, kind, threads, main_path = argv
    _step_back()
    torch.set_num_threads(int(threads))
    serve(Connection(int(fd)), cast(ReferenceKind, kind), main_path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
