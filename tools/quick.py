"""Lint the files that changed, and run the tests of their rooms: `make quick`.

What changed is told by git: since this branch left BASE, committed or not. Tests that changed come
first, then those that name a module that changed, then those of its room; what has not begun after
a good half of a minute is skipped, and told.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "README.md": "docs", "CHANGELOG.md": "docs", "docs": "docs", "benchmarks": "bench",
    "examples": "examples",
}  # fmt: skip
"""Which folder of tests belongs to what lies at the top; packages have a folder for each room."""
MINUTES = "0.6"


def main(base: str, *options: str) -> int:
    """Return the exit status of the first thing that fails."""
    changed = [path for path in changes(base) if (ROOT / path).exists()]
    python = [str(path) for path in changed if path.suffix == ".py"]
    steps = []
    if python:
        steps += [["ruff", "check", *python], ["ruff", "format", "--check", *python]]
    steps.append(["lint-imports"])
    tests = tests_of(changed)
    if tests:
        steps.append(["pytest", "-rs", "--minutes", MINUTES, *options, *tests])
    print(f"{len(changed)} files changed since {base}; tests:", *tests or ["none"], flush=True)
    for step in steps:
        step[0] = str(Path(sys.executable).with_name(step[0]))
        done = subprocess.run(step, cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    return 0


def changes(base: str) -> list[Path]:
    """Return what is not as it was where this branch left `base`, relative to the root."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (left,) = git("merge-base", base, "HEAD")
    names = git("diff", "--name-only", left) + git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in dict.fromkeys(names)]


def tests_of(changed: list[Path]) -> list[str]:
    """Return the files and folders of tests that belong to what changed, the nearest first."""
    files = [str(path) for path in changed if _is_test(path)]
    rooms: dict[str, None] = {}
    modules = []
    for path in changed:
        if _is_test(path):
            continue
        if path.suffix == ".py":
            modules.append(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
        room = Path("tests", _room(path))
        if room != Path("tests") and (ROOT / room).is_dir():
            rooms[str(room)] = None
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = test.read_text()
        if any(module in text for module in modules):
            files.append(str(test.relative_to(ROOT)))
    return [*dict.fromkeys(files), *rooms]


def _is_test(path: Path) -> bool:
    return path.parts[0] == "tests" and path.name.startswith("test_")


def _room(path: Path) -> str:
    top = path.parts[0]
    if top in ROOMS:
        return ROOMS[top]
    if top == "egeria_core":
        return "pipeline" if "pipeline" in path.parts else "core"
    return path.parts[1] if top in ("egeria_cache", "tests") and len(path.parts) > 2 else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
