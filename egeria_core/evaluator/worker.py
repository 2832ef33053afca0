"""The evaluator process: `python -m egeria_core.evaluator.worker`, started by `ProcessEvaluator`.

Two threads, as in the paper's Figure 6. The reference thread polls the input queue (IQ), waits for
a calm CPU, runs the reference and puts its activation on the reference-output queue (ROQ). The main
thread joins ROQ with the training-output queue (TOQ), computes the plasticity and sends it back.
When the training process goes away, so does this one.
"""

from __future__ import annotations

import os
import queue
import runpy
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from egeria_core.config import ReferenceKind
from egeria_core.evaluator.base import POLL_S, QUEUE_LENGTH
from egeria_core.evaluator.gate import LoadGate
from egeria_core.evaluator.wire import receive
from egeria_core.judge import InputItem, ReferenceItem, ReferenceRunner, Verdict, compare

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
    """Both loops, on connections given to it; runs in any thread or process.

    Args:
        inputs: IQ, read end.
        outputs: TOQ, read end.
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
        outputs: Connection,
        verdicts: Connection,
        kind: ReferenceKind,
        gate: LoadGate,
        main_path: str = "",
        patience_s: float = 30.0,
    ) -> None:
        self._inputs, self._outputs, self._verdicts = inputs, outputs, verdicts
        self._runner = ReferenceRunner(kind)
        self._gate = gate
        self._find = MainModule(main_path)
        self._patience_s = patience_s
        self._stop = threading.Event()
        # ROQ. A string is why the evaluation was dropped; an exception ends the worker.
        self._references: queue.Queue[ReferenceItem | tuple[InputItem, str] | Exception] = (
            queue.Queue(QUEUE_LENGTH)
        )

    def run(self) -> None:
        """Serve until the training side hangs up or an evaluation fails."""
        thread = threading.Thread(target=self._run_references, name="egeria-reference")
        thread.start()
        try:
            while not self._stop.is_set():
                try:
                    found = self._references.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if isinstance(found, Exception):
                    self._send(f"{type(found).__name__}: {found}")
                    return
                self._send(self._judge(found))
        except (EOFError, OSError):
            return
        except Exception as error:
            self._send(f"{type(error).__name__}: {error}")
        finally:
            self._stop.set()
            thread.join(timeout=30.0)

    def _judge(self, found: ReferenceItem | tuple[InputItem, str]) -> Verdict:
        training = receive(self._outputs, self._find)
        if isinstance(found, tuple):
            item, why = found
            return Verdict(item.step, item.layer, None, dropped=why)
        verdict = compare(found, training)
        self._runner.heed(verdict)
        return verdict

    def _send(self, message: Verdict | str) -> None:
        with suppress(OSError):
            self._verdicts.send(message)

    def _run_references(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._inputs.poll(POLL_S):
                    continue
                item: InputItem = receive(self._inputs, self._find)
                why = self._wait_for_calm()
                if why is not None and item.modules is None:
                    self._put((item, why))
                else:
                    # A layer's structure comes once: it is taken in however busy the machine is.
                    self._put(self._runner.run(item))
        except (EOFError, OSError):
            self._stop.set()
        except Exception as error:  # any model code may run here
            self._put(error)

    def _put(self, found: ReferenceItem | tuple[InputItem, str] | Exception) -> None:
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._references.put(found, timeout=POLL_S)
                return

    def _wait_for_calm(self) -> str | None:
        """Wait for the gate; return why not, if it stayed shut."""
        deadline = time.monotonic() + self._patience_s
        while not self._gate.is_open():
            if self._stop.wait(POLL_S) or time.monotonic() > deadline or self._inputs.poll(0):
                return f"CPU load of other processes is {self._gate.load:.0%}"
        return None


def main(argv: list[str]) -> int:
    """Serve on the file descriptors given; see `ProcessEvaluator`."""
    inputs, outputs, verdicts = (Connection(int(fd)) for fd in argv[:3])
    kind, limit, threads, excluded, main_path = argv[3:8]
    # The first to yield the CPU, and the first that the kernel kills when memory is short.
    with suppress(OSError):
        os.nice(10)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(int(threads))
    pids = tuple(int(pid) for pid in excluded.split(",") if pid)
    gate = LoadGate(float(limit), pids)
    EvaluatorWorker(inputs, outputs, verdicts, cast(ReferenceKind, kind), gate, main_path).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
