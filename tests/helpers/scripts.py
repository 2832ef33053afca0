"""Programs run as their users run them: a file as `__main__`, cells of a notebook, or launched.

Loops at module level, notebooks' cells and what stands under `if __name__ == "__main__"` keep their
names in a module that the whole program can see: a function inside a test shows none of that. Most
programs need no process of their own (importing torch takes longer than they do); `launched`
starts real ones.

A program may hold lines for one run only: those that end in `# +` belong to the run with the cache,
those that end in `# -` to the plain one (`side`).
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Ran", "launched", "run_cells", "run_file", "run_kernel", "side"]

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node", "2"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines",
                   "1", "--num_cpu_threads_per_process", "1", "--mixed_precision", "no",
                   "--dynamo_backend", "no", "--num_processes", "1"],
}  # fmt: skip


@dataclass
class Ran:
    """What a program did."""

    losses: list[float] = field(default_factory=list)
    """Each that `backward` was called on."""
    output: str = ""
    """What it printed; of a launched one also what it wrote to stderr."""
    told: list[str] = field(default_factory=list)
    """What Egeria's loggers said, from WARNING on."""
    warned: list[str] = field(default_factory=list)
    """Python's warnings, as `Category: text`."""
    error: BaseException | None = None
    """The first that nothing caught; of a launched one its text."""
    names: dict[str, Any] = field(default_factory=dict)
    """Its names at module level; of a launched one, those that JSON can hold."""


def side(text: str, *, cached: bool) -> str:
    """Return a program without the lines of the other run."""
    other = re.compile(r"#\s*-$" if cached else r"#\s*\+$")
    return "\n".join(line for line in text.splitlines() if not other.search(line)) + "\n"


def run_file(path: Path, *arguments: str, cwd: Path | None = None) -> Ran:
    """Run a file as `python path arguments` would, but in this process."""
    return _run([(str(path), path.read_text())], path, arguments, cwd or path.parent)


def run_cells(cells: Sequence[str], cwd: Path) -> Ran:
    """Run cells of a notebook, one after the other; an error ends the cell and the rest goes on."""
    named = [(f"<cell {number} in {cwd.name}>", cell) for number, cell in enumerate(cells)]
    return _run(named, None, (), cwd)


def run_kernel(cells: Sequence[str], cwd: Path) -> Ran:
    """Run cells in a kernel of their own, as a notebook does."""
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook()
    before = _BEFORE.format(path=[str(cwd), str(ROOT)])
    sources = [before, *cells, _AFTER]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(cwd)}}
    ).execute()
    return Ran(**json.loads((cwd / "ran.json").read_text()))


_BEFORE = """
import sys
sys.path[:0] = {path}
from tests.helpers import scripts as _scripts
_scripts.begin()
"""
_AFTER = """
_scripts.end(globals())
"""
_OPEN: list[Any] = []


def begin() -> None:
    """Note what the cells of this kernel do from now on, from the seeds of a start."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    ran = Ran()
    noting = _noting(ran)
    noting.__enter__()
    _OPEN.append((ran, noting))


def end(names: dict[str, Any]) -> None:
    """Write down what they did."""
    ran, noting = _OPEN.pop()
    noting.__exit__(None, None, None)
    ran.names = {k: v for k, v in names.items() if not k.startswith("_") and _plain(v)}
    Path("ran.json").write_text(json.dumps(asdict(ran)))


def launched(launcher: str, path: Path, *arguments: str, timeout_s: float = 150) -> list[Ran]:
    """Run a file under a launcher; return what each of its processes did, by rank."""
    with tempfile.TemporaryDirectory() as results:
        search = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search.strip(os.pathsep)}
        done = subprocess.run(
            [*LAUNCHERS[launcher], __file__, results, str(path), *arguments],
            env=environment, cwd=path.parent, capture_output=True, text=True, timeout=timeout_s,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        ran = [Ran(**json.loads(one.read_text())) for one in sorted(Path(results).iterdir())]
    assert ran, done.stdout[-3000:] + done.stderr[-3000:]
    for one in ran:
        one.output = done.stdout + done.stderr
    assert any(one.error for one in ran) or done.returncode == 0, ran[0].output[-3000:]
    return ran


def _run(
    pieces: list[tuple[str, str]], path: Path | None, arguments: Sequence[str], cwd: Path
) -> Ran:
    ran, main = Ran(), types.ModuleType("__main__")
    if path is not None:
        main.__file__ = str(path)
    printed = io.StringIO()
    with (
        _as_a_program(main, [str(path or "notebook"), *arguments], cwd),
        _noting(ran),
        contextlib.redirect_stdout(printed),
    ):
        for name, text in pieces:
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            try:
                exec(compile(text, name, "exec"), main.__dict__)
            except BaseException as error:
                if not (isinstance(error, SystemExit) and not error.code):
                    ran.error = ran.error or error
    ran.output, ran.names = printed.getvalue(), main.__dict__
    return ran


@contextlib.contextmanager
def _as_a_program(main: types.ModuleType, argv: list[str], cwd: Path) -> Iterator[None]:
    """Make a module `__main__` for a while, in its directory and with the seeds of a start."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = sys.modules["__main__"], sys.argv, sys.path[:], Path.cwd(), set(sys.modules)
    environment = dict(os.environ)
    sys.modules["__main__"], sys.argv = main, argv
    sys.path.insert(0, str(cwd))
    os.chdir(cwd)
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before[:3]
        os.chdir(before[3])
        os.environ.clear()
        os.environ.update(environment)
        for name in set(sys.modules) - before[4]:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(cwd):
                del sys.modules[name]  # a module of the program's own: another has its own
        _forget_what_trainers_share()


def _forget_what_trainers_share() -> None:
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@contextlib.contextmanager
def _noting(ran: Ran) -> Iterator[None]:
    """Note losses, warnings and what Egeria's loggers say."""
    import torch

    backward = torch.autograd.backward

    def noting(tensors: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if tensor.numel() == 1:
                ran.losses.append(tensor.item())
        backward(tensors, *args, **kwargs)

    handler = _Listener(ran)
    logger = logging.getLogger("egeria")
    inner = logging.getLogger("egeria_cache.store")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        torch.autograd.backward = noting
        logger.addHandler(handler)
        inner.addHandler(handler)
        try:
            yield
        finally:
            torch.autograd.backward = backward
            logger.removeHandler(handler)
            inner.removeHandler(handler)
            ran.warned += [f"{one.category.__name__}: {one.message}" for one in caught]


class _Listener(logging.Handler):
    def __init__(self, ran: Ran) -> None:
        super().__init__(logging.WARNING)
        self.ran = ran

    def emit(self, record: logging.LogRecord) -> None:
        self.ran.told.append(record.getMessage())


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _main() -> None:
    """Be the file that a launcher starts: results' directory, program, its arguments."""
    sys.path.remove(str(Path(__file__).parent))
    results, path, *arguments = sys.argv[1:]
    ran = run_file(Path(path), *arguments)
    ran.names = {name: value for name, value in ran.names.items()
                 if not name.startswith("_") and _plain(value)}  # fmt: skip
    sys.stdout.write(ran.output)
    error = ran.error
    ran.error = None
    told = asdict(ran) | {"error": None if error is None else repr(error)}
    Path(results, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))
    if error is not None:
        raise error


if __name__ == "__main__":
    _main()
