"""Threads of ours compute on one core, and leave every other thread as it was."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from egeria_cache.attempt import compute_on_one_core


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)


def in_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_ours_compute_on_one_core_others_as_before(three_threads):
    def ours():
        compute_on_one_core()
        return torch.get_num_threads()

    with ThreadPoolExecutor(4, initializer=compute_on_one_core) as pool:
        assert list(pool.map(lambda _: torch.get_num_threads(), range(16))) == [1] * 16
    assert in_new_thread(ours) == 1
    assert torch.get_num_threads() == 3
    assert in_new_thread(torch.get_num_threads) == 3
