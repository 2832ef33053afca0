"""Evaluates in a process of its own, so that neither its CPU time nor its faults are training's."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path

from egeria_core.config import ReferenceKind
from egeria_core.errors import EvaluatorError
from egeria_core.reference.runner import InputItem
from egeria_core.reference.wire import POLL_S, send
from egeria_core.verdict import Verdict

__all__ = ["ProcessEvaluator"]

QUEUE_LENGTH = 2
"""Evaluations that may wait. More would be read too late to be of use."""
CPU_LOAD_LIMIT = 0.5
"""It runs only while the rest of the machine uses less than this part of the CPUs (section 4.1.2);
past it evaluations are dropped. At 1 it always runs."""
CPU_SHARE = 4
"""A quarter of the machine's CPUs are its own."""


class ProcessEvaluator:
    """Owns the process and the two threads that talk to it.

    Not `multiprocessing`: its spawn runs the training script again in the child, its fork copies
    a process full of threads and CUDA, and a child killed while it holds a queue's lock or half a
    message blocks the parent for ever. Here both ends are plain pipes, no lock is shared, and the
    training thread touches none of them.

    Args:
        kind: Reference to use.
        training_on_cpu: Whether the training process's own load is to be left out of the gate.
    """

    immediate = False

    def __init__(self, kind: ReferenceKind, *, training_on_cpu: bool = True) -> None:
        threads = max(1, (os.cpu_count() or 1) // CPU_SHARE)
        excluded = str(os.getpid()) if training_on_cpu else ""
        inputs, self._inputs = Pipe(duplex=False)
        self._verdicts, verdicts = Pipe(duplex=False)
        theirs = (inputs, verdicts)
        fds = [connection.fileno() for connection in theirs]
        main_path = str(getattr(sys.modules["__main__"], "__file__", "") or "")
        arguments = [kind, str(CPU_LOAD_LIMIT), str(threads), excluded, main_path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "egeria_core.reference.worker", *map(str, fds), *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_search_path())},
            # Ctrl-C is for the training process; this one leaves when its pipes close.
            start_new_session=True,
        )
        for connection in theirs:
            connection.close()
        self._items: queue.Queue[InputItem | None] = queue.Queue(QUEUE_LENGTH)
        self._ready: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._error: str | None = None
        self._reported = False
        self._in_flight = 0
        self._threads = [
            threading.Thread(target=self._send_items, name="egeria-evaluator-send", daemon=True),
            threading.Thread(target=self._read, name="egeria-evaluator-read", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id of the evaluator."""
        return self._process.pid

    def _send_items(self) -> None:
        while not self._stop.is_set():
            try:
                item = self._items.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if item is None:
                return
            item.arrive()
            try:
                send(self._inputs, item)
            except OSError:
                return  # the reader says why
            except Exception as error:  # the model may hold something that cannot be pickled
                self._fail(f"cannot be sent: {type(error).__name__}: {error}")
                return

    def _read(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._verdicts.poll(POLL_S):
                    continue
                message = self._verdicts.recv()
            except (EOFError, OSError):
                code = self._process.poll()
                self._fail("its process has ended" + ("" if code is None else f" (code {code})"))
                return
            if isinstance(message, str):
                self._fail(message)
                return
            self._ready.put(message)

    def _fail(self, why: str) -> None:
        if self._error is None and not self._stop.is_set():
            self._error = why

    def submit(self, item: InputItem) -> bool:
        """Queue for sending, or drop where that is not possible at once."""
        # What is in the pipes and in the worker counts as well: it is all waiting in front of us.
        if self._error is not None or self._in_flight >= QUEUE_LENGTH:
            return False
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        self._in_flight += 1
        return True

    def poll(self) -> list[Verdict]:
        """Return the verdicts that are ready; raise once when the process is gone."""
        verdicts = []
        while not self._ready.empty():
            verdicts.append(self._ready.get())
        self._in_flight -= len(verdicts)
        if self._error is not None and not verdicts and not self._reported:
            self._reported = True
            raise EvaluatorError(self._error)
        return verdicts

    def drain(self, timeout_s: float) -> list[Verdict]:
        """Wait until every verdict is there, the process is gone, or time is up."""
        verdicts = []
        deadline = time.monotonic() + timeout_s
        while self._in_flight and self._error is None and time.monotonic() < deadline:
            with suppress(queue.Empty):
                verdicts.append(self._ready.get(timeout=POLL_S))
                self._in_flight -= 1
        return verdicts

    def close(self) -> None:
        """End the process and join the threads; idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        with suppress(queue.Full):
            self._items.put_nowait(None)
        # Killing first frees a sender that is stuck in a full pipe. There is nothing to lose in
        # there: it holds no file and no lock.
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(timeout=30.0)
        for connection in (self._inputs, self._verdicts):
            connection.close()


def _search_path() -> list[str]:
    """Return where this process finds its modules, so that the evaluator finds the same ones."""
    here = str(Path.cwd())
    return [path or here for path in sys.path]
