"""Run the benchmarks, one process after the other.

    python -m benchmarks [NAME ...] [--list] [--full]

Each module or package here with a `main` is a benchmark. Without --full they run in their quick
mode, which shows that they work and roughly how large things are, and writes no results.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
OTHER = ("__main__", "report")


def benchmarks() -> dict[str, str]:
    """Return name -> first line of the docstring, without importing anything."""
    found = {}
    for path in sorted([*HERE.glob("*.py"), *HERE.glob("*/__main__.py")]):
        name = path.parent.name if path.name == "__main__.py" and path.parent != HERE else path.stem
        tree = ast.parse(path.read_text())
        has_main = any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body)
        if has_main and name not in OTHER:
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """List or run; return 1 if one of them failed, 2 on a name that does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
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
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if not options.full:
            command.append("--quick")
        if subprocess.run(command, cwd=HERE.parent, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
