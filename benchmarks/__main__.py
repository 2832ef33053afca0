"""Run the benchmarks, one process after the other.

    python -m benchmarks [NAME ...] [--list] [--full]

Each module with a `main` is a benchmark. Without --full they run in a quick mode, which shows that
they work and roughly how large things are; their figures are those of the full runs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
SMALL = (
    ("--rounds", "4"), ("--samples", "512"), ("--steps", "60"), ("--seeds", "1"), ("--epochs", "4"),
)  # fmt: skip


def benchmarks() -> dict[str, str]:
    """Return name -> first line of the docstring, without importing anything."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text())
        has_main = any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body)
        if has_main and path.stem != "__main__":
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def quick_arguments(name: str) -> list[str]:
    """Return `--quick` if the benchmark knows it, else small values of what it knows."""
    text = (HERE / f"{name}.py").read_text()
    if '"--quick"' in text:
        return ["--quick"]
    return [word for option, value in SMALL if f'"{option}"' in text for word in (option, value)]


@contextlib.contextmanager
def kept(directory: Path) -> Iterator[None]:
    """Put the committed results back: a quick run's figures are none."""
    before = {path: path.read_bytes() for path in directory.glob("*") if path.is_file()}
    try:
        yield
    finally:
        for path in directory.glob("*"):
            if path.is_file() and path not in before:
                path.unlink()
        for path, content in before.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one benchmark in a process of its own; return its exit code."""
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=HERE.parent, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """List or run; return 1 if one of them failed, 2 on a name that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--full", action="store_true", help="full size; writes benchmarks/results")
    options = parser.parse_args(argv)
    known = benchmarks()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    if options.list:
        for name, text in known.items():
            print(f"{name:22} {text}")
        return 0
    failed = []
    for name in options.names or known:
        print(f"== {name}: {known[name]}", flush=True)
        started = time.perf_counter()
        with contextlib.nullcontext() if options.full else kept(HERE / "results"):
            if run(name, [] if options.full else quick_arguments(name)):
                failed.append(name)
        print(f"== {name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
