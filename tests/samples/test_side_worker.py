"""The side worker: samples that are asked for out of turn."""

from __future__ import annotations

import pytest

from egeria_cache.samples.loading import Loaded, Task
from egeria_cache.samples.side_worker import SideWorker


@pytest.mark.timeout(20)
def test_a_pass_that_ends_in_the_middle_of_a_task_does_not_wait_for_itself():
    """The garbage collector ends passes where it likes, in the thread that is asking too."""

    class Collected(SideWorker):
        def _start(self):
            self.close()
            return [Loaded(7, "rows", frozenset())]

    worker = Collected(None, {})
    assert worker.ask(Task(7, [0], [0], [0], 0)).data == "rows"
    worker.close()
    assert worker.ask(Task(7, [0], [0], [0], 0)).data == "rows"
