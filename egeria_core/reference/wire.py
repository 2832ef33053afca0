"""Messages between the training process and its evaluator: a pickle, then the tensors' bytes.

The bytes go to the pipe straight from the tensors' memory, outside the interpreter lock: pickling
100 MB of activations in a background thread would hold up the training thread.
Both ends belong to one run; nothing is ever read from anywhere else.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def _rebuild(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    """Writes plain CPU tensors as references to buffers that travel behind the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided:
            return NotImplemented  # of a parameter its data comes by in turn
        plain = obj.detach().to("cpu").contiguous()
        if plain.is_quantized:
            return NotImplemented
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
