"""How the threads that work beside training compute: on one core each."""

from __future__ import annotations

import os
import threading

import torch

__all__ = ["compute_on_one_core"]

_locks: dict[int, threading.Lock] = {}


def compute_on_one_core() -> None:
    """Give the calling thread one core; called first thing in a thread of our own.

    PyTorch gives every thread that computes an OpenMP team of its own, as large as the machine.
    Such a team beside training crowds the cores, and slows every kernel of the training thread.

    What `torch.set_num_threads` sets is also what threads made later start with, the user's too:
    that default is put back, from a thread that ends with it.
    """
    # One for each process: a child forked while it is held would wait for ever.
    with _locks.setdefault(os.getpid(), threading.Lock()):
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        keeper = threading.Thread(target=torch.set_num_threads, args=(default,))
        keeper.start()
        keeper.join()
