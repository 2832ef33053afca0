"""The evaluator process: `python -m egeria_core.reference.worker`, started by `ProcessEvaluator`.

It takes evaluations from one pipe, waits for a calm CPU, runs layer and reference and sends the
plasticity back. When the training process goes away, so does this one.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from egeria_core.config import ReferenceKind
from egeria_core.reference.load import LoadGate
from egeria_core.reference.runner import InputItem, ReferenceRunner
from egeria_core.reference.wire import POLL_S, receive
from egeria_core.verdict import Verdict

__all__ = ["EvaluatorWorker", "main"]


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


class EvaluatorWorker:
    """The loop, on connections given to it; runs in any thread or process.

    Args:
        inputs: Where evaluations come from.
        verdicts: Where verdicts go. An exception's text goes there too, and ends the worker.
        kind: Reference to use.
        gate: Opens when the machine is calm.
        main_path: The training script, for classes that are defined in it.
        patience_s: How long an evaluation waits for the gate before it is dropped; a newer one
            that has arrived meanwhile drops it at once.
    """

    def __init__(
        self,
        inputs: Connection,
        verdicts: Connection,
        kind: ReferenceKind,
        gate: LoadGate,
        main_path: str = "",
        patience_s: float = 30.0,
    ) -> None:
        self._inputs, self._verdicts, self._gate = inputs, verdicts, gate
        self._runner = ReferenceRunner(kind)
        self._find = MainModule(main_path)
        self._patience_s = patience_s

    def run(self) -> None:
        """Serve until the training side hangs up or an evaluation fails."""
        try:
            while True:
                item: InputItem = receive(self._inputs, self._find)
                self._send(self._judged(item))
        except (EOFError, OSError):
            return
        except Exception as error:  # any model code may run here
            self._send(f"{type(error).__name__}: {error}")

    def _judged(self, item: InputItem) -> Verdict:
        why = self._wait_for_calm()
        # A layer's structure comes once: it is taken in however busy the machine is.
        if why is not None and item.modules is None:
            return Verdict(item.step, item.layer, None, dropped=why)
        return self._runner.finish(*self._runner.run(item))

    def _send(self, message: Verdict | str) -> None:
        with suppress(OSError):
            self._verdicts.send(message)

    def _wait_for_calm(self) -> str | None:
        """Wait for the gate; return why not, if it stayed shut."""
        deadline = time.monotonic() + self._patience_s
        while not self._gate.is_open():
            if self._inputs.poll(POLL_S) or time.monotonic() > deadline:
                return f"CPU load of other processes is {self._gate.load:.0%}"
        return None


def main(argv: list[str]) -> int:
    """Serve on the file descriptors given; see `ProcessEvaluator`."""
    inputs, verdicts = (Connection(int(fd)) for fd in argv[:2])
    kind, limit, threads, excluded, main_path = argv[2:7]
    # The first to yield the CPU, and the first that the kernel kills when memory is short.
    with suppress(OSError):
        os.nice(10)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(int(threads))
    pids = tuple(int(pid) for pid in excluded.split(",") if pid)
    gate = LoadGate(float(limit), pids)
    EvaluatorWorker(inputs, verdicts, cast(ReferenceKind, kind), gate, main_path).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
