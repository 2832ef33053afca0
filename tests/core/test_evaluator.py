"""The evaluator may be killed, stopped, starved or fed with rubbish; training must not notice."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from egeria_core import EvaluatorError
from egeria_core.history import Verdict
from egeria_core.reference.capture import Call, Probe, copy_modules, copy_weights
from egeria_core.reference.evaluators import Evaluator, InlineEvaluator, ProcessEvaluator, send
from egeria_core.reference.references import InputItem
from egeria_core.reference.worker import MainModule, serve
from tests.helpers.core_nets import mlp

DEADLINE_S = 600.0
"""The process has the lowest priority: beside busy ones it may hardly get on."""
pytestmark = pytest.mark.timeout(1200)


def wait_for(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, f"timed out: {why}"
        time.sleep(0.01)


def make_item(
    modules: list[nn.Module], step: int, *, new: bool = False, judge: bool = True
) -> InputItem:
    generator = torch.Generator().manual_seed(step)
    probe = Probe([Call("0", (torch.randn(6, 8, generator=generator),), {}, {})], 6)
    return InputItem(
        step=step, layer=0, probe=probe, judge=judge and not new, refresh=True,
        weights=copy_weights(modules), modules=copy_modules(modules) if new else None,
    )  # fmt: skip


def move(modules: list[nn.Module], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in modules[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def drive(evaluator: Evaluator, num_steps: int = 4) -> list[Verdict]:
    """Submit one evaluation after another, each as soon as there is room."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(8, 8)]
    verdicts: list[Verdict] = []
    for step in range(num_steps):
        item = make_item(modules, step, new=step == 0)
        wait_for(lambda item=item: evaluator.submit(item), "room in the queue")  # type: ignore[misc]
        verdicts += evaluator.poll(DEADLINE_S)
        move(modules, step)
    return verdicts


@pytest.fixture
def process() -> Iterator[ProcessEvaluator]:
    evaluator = ProcessEvaluator("fp32")
    yield evaluator
    evaluator.close()


def test_a_process_reads_what_inline_reads(process: ProcessEvaluator) -> None:
    inline = drive(InlineEvaluator("fp32"))
    expected = [verdict.value for verdict in inline]
    assert expected[0] is None
    assert all(value is not None and value > 0 for value in expected[1:])
    remote = drive(process)
    assert remote[0].value is None
    assert [v.value for v in remote[1:]] == pytest.approx(expected[1:], rel=1e-4)
    assert [v.step for v in inline] == [0, 1, 2, 3]


def test_a_killed_process_is_reported_once_and_never_blocks(process: ProcessEvaluator) -> None:
    assert process.submit(make_item([nn.Linear(8, 8)], 0, new=True))
    os.kill(process._process.pid, signal.SIGKILL)
    errors: list[str] = []

    def poll() -> bool:
        try:
            process.poll()
        except EvaluatorError as error:
            errors.append(str(error))
        return bool(errors)

    wait_for(poll, "the loss to be noticed")
    assert "its process has ended" in errors[0]
    assert process.poll() == []


def test_a_stopped_process_makes_drops_not_delays(process: ProcessEvaluator) -> None:
    os.kill(process._process.pid, signal.SIGSTOP)
    modules: list[nn.Module] = [nn.Linear(8, 8)]
    accepted = [process.submit(make_item(modules, step)) for step in range(10)]
    assert accepted.count(True) <= 2
    assert not accepted[-1]
    process.close()  # and closing does not wait for it either
    assert not psutil.pid_exists(process._process.pid)


def test_closing_ends_the_process_and_its_threads(process: ProcessEvaluator) -> None:
    pid = process._process.pid
    process.close()
    process.close()
    assert not psutil.pid_exists(pid)
    assert not [t for t in threading.enumerate() if t.name.startswith("egeria-")]


def test_the_process_leaves_when_its_parent_is_gone() -> None:
    """The kernel closes a dead parent's end of the pipe; closing ours looks the same."""
    ours, theirs = Pipe()
    fd = theirs.fileno()
    command = [sys.executable, "-m", "egeria_core.reference.worker", str(fd), "fp32", ""]
    worker = subprocess.Popen(command, pass_fds=[fd])
    ours.close()
    theirs.close()
    assert worker.wait(DEADLINE_S) == 0


class Greedy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise MemoryError("no memory left")


def test_what_cannot_be_pickled_is_an_error(process: ProcessEvaluator) -> None:
    item = make_item([nn.Linear(8, 8)], 0, new=True)
    assert item.modules is not None
    item.modules[0].oops = lambda: None  # type: ignore[assignment]
    assert process.submit(item)
    with pytest.raises(EvaluatorError, match="cannot be sent"):
        wait_for(lambda: bool(process.poll()), "the error to arrive")


def test_what_fails_in_the_worker_is_told_and_ends_it() -> None:
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, "fp32"))
    thread.start()
    item = make_item([nn.Linear(8, 8)], 0, new=True)
    item.modules, item.weights = [Greedy()], [{}]
    send(ours, item)
    assert ours.poll(DEADLINE_S), "no answer"
    assert "MemoryError: no memory left" in ours.recv()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


def test_classes_of_the_script_are_found_if_it_is_guarded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "class Net:\n    class Inner: pass\nif __name__ == '__main__':\n    raise SystemExit(1)\n"
    )
    assert MainModule(str(script)).Net.Inner.__name__ == "Inner"
    script.write_text("class Net: pass\nraise SystemExit('trained twice')\n")
    with pytest.raises(AttributeError, match="guard"):
        _ = MainModule(str(script)).Net
    with pytest.raises(AttributeError, match="guard"):
        _ = MainModule("").Net


def test_a_forgotten_controller_takes_its_process_along() -> None:
    from egeria_core import FreezeController

    model = mlp(8, 8, 8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = FreezeController(
        model, optimizer, evaluate_every=1, bootstrap=None, evaluator="process"
    )
    del controller
    gc.collect()
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("egeria-evaluator")],
        "the threads to end",
    )
