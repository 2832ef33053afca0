"""What the training thread asks of an evaluator: inline, or in a process of its own.

In a process neither its CPU time nor its faults are training's. Messages between the two are a
pickle, then the tensors' bytes, which go to the pipe straight from the tensors' memory, outside the
interpreter lock: pickling 100 MB of activations in a background thread would hold up the training
thread. Both ends belong to one run; nothing is ever read from anywhere else.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from egeria_cache.skip import RandomState
from egeria_core.config import ReferenceKind
from egeria_core.history import Verdict
from egeria_core.reference.references import EvaluatorError, InputItem, ReferenceRunner

QUEUE_LENGTH = 2
"""Evaluations that may wait. More would be read too late to be of use."""


def _rebuild(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    """Writes plain CPU tensors as references to buffers that travel behind the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented  # of a parameter its data comes by in turn
        plain = obj.detach().cpu().contiguous()
        raw: Any = plain.reshape(-1).view(torch.uint8).numpy()
        return _rebuild, (pickle.PickleBuffer(raw), plain.dtype, tuple(plain.shape))


def send(connection: Connection, message: Any) -> None:
    """Write one message; blocks while the pipe is full.

    Raises:
        OSError: The other end is gone.
        Exception: The message cannot be pickled; nothing was written.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(message)
    connection.send((head.getvalue(), len(buffers)))
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def receive(connection: Connection) -> Any:
    """Read one message; blocks until it is whole.

    Raises:
        EOFError: The other end is gone.
    """
    head, count = connection.recv()
    return pickle.loads(head, buffers=[bytearray(connection.recv_bytes()) for _ in range(count)])


class InlineEvaluator:
    """Runs the reference in `submit`: reproducible."""

    def __init__(self, kind: ReferenceKind) -> None:
        self._runner = ReferenceRunner(kind)
        self._ready: list[Verdict] = []

    def submit(self, item: InputItem) -> bool:
        """Run the reference now; never dropped.

        Raises:
            EvaluatorError: The evaluation failed.
        """
        # Building one may initialise weights, and a layer's own code may draw.
        generators = RandomState.now()
        try:
            item.arrive()
            self._ready.append(self._runner.run(item))
        except Exception as error:  # any model code may run here
            raise EvaluatorError(f"{type(error).__name__}: {error}") from error
        finally:
            generators.restore()
        return True

    def poll(self, timeout_s: float = 0.0) -> list[Verdict]:
        """Return what `submit` read."""
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Nothing to stop."""


class ProcessEvaluator:
    """Owns the process and the thread that talks to it.

    Not `multiprocessing`: its spawn runs the training script again in the child, its fork copies
    a process full of threads and CUDA, and a child killed while it holds a queue's lock or half a
    message blocks the parent for ever. Here both ends are a plain pipe, no lock is shared, and the
    training thread does not touch it.

    Args:
        kind: Reference to use.
    """

    def __init__(self, kind: ReferenceKind) -> None:
        main_path = str(getattr(sys.modules["__main__"], "__file__", "") or "")
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "egeria_core.reference.worker", str(fd), kind, main_path],
            pass_fds=[fd], stdin=subprocess.DEVNULL,
            # It finds the same modules as this process.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            # Ctrl-C is for the training process; this one leaves when its pipe closes.
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._items = queue.SimpleQueue[tuple[InputItem, Future[Verdict]] | None]()
        self._waiting = deque[Future[Verdict]]()
        self._thread = threading.Thread(target=self._talk, name="egeria-evaluator", daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        while (asked := self._items.get()) is not None:
            item, answer = asked
            try:
                answer.set_result(self._ask(item))
            except Exception as error:
                answer.set_exception(error)

    def _ask(self, item: InputItem) -> Verdict:
        item.arrive()
        try:
            # Where it is gone, what is received says so.
            with suppress(OSError):
                send(self._pipe, item)
        except Exception as error:  # the model may hold something that cannot be pickled
            raise EvaluatorError(f"cannot be sent: {type(error).__name__}: {error}") from error
        try:
            verdict: Verdict | str = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._process.poll()
            how = "" if code is None else f" (code {code})"
            raise EvaluatorError(f"its process has ended{how}") from error
        if isinstance(verdict, str):
            raise EvaluatorError(verdict)
        return verdict

    def submit(self, item: InputItem) -> bool:
        """Queue for sending, or drop where others wait already."""
        if sum(not answer.done() for answer in self._waiting) >= QUEUE_LENGTH:
            return False
        answer: Future[Verdict] = Future()
        self._waiting.append(answer)
        self._items.put((item, answer))
        return True

    def poll(self, timeout_s: float = 0.0) -> list[Verdict]:
        """Return the verdicts that are ready, having waited so long for all of them.

        Raises:
            EvaluatorError: An evaluation failed, and the process has ended: close it.
        """
        wait(self._waiting, timeout_s, FIRST_EXCEPTION)
        verdicts: list[Verdict] = []
        while self._waiting and self._waiting[0].done():
            verdicts.append(self._waiting.popleft().result())
        return verdicts

    def close(self) -> None:
        """End the process and join the thread; idempotent."""
        # Killing first frees a sender that is stuck in a full pipe. There is nothing to lose in
        # there: it holds no file and no lock.
        self._process.kill()
        self._process.wait()
        self._items.put(None)
        self._thread.join(timeout=30.0)
        self._pipe.close()


Evaluator = InlineEvaluator | ProcessEvaluator
"""Takes evaluations, gives verdicts in the same order; for the training thread alone."""
