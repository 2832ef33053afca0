"""A results file's environment in words."""

from __future__ import annotations

from typing import Any

__all__ = ["command_of", "where"]


def command_of(name: str, environment: dict[str, Any]) -> str:
    """Return the command that wrote the figures, or the one that would."""
    return str(environment.get("command") or f"python -m benchmarks.{name}")


def where(environment: dict[str, Any]) -> str:
    """Return hardware, versions, date and seeds in one line."""
    if not environment:
        return "hardware, versions and date were not recorded"
    cpus = _first(environment, "cpus", "cpu_count", "cores")
    threads = environment.get("threads")
    parts = [
        str(environment.get("gpu") or ""),
        str(environment.get("cpu") or ""),
        f"{cpus} CPUs" if cpus else "",
        f"{threads} thread{'' if threads == 1 else 's'}" if threads else "",
        f"torch {environment['torch']}" if environment.get("torch") else "",
        f"Python {environment['python']}" if environment.get("python") else "",
        str(environment.get("dtype") or ""),
        str(environment["date"])[:24].partition("T")[0] if environment.get("date") else
        "date not recorded",
        _seeds(_first(environment, "seeds", "seed")),
        str(environment.get("note") or ""),
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def _first(environment: dict[str, Any], *names: str) -> Any:
    return next((environment[n] for n in names if environment.get(n) is not None), None)


def _seeds(seeds: Any) -> str:
    if seeds is None:
        return ""
    if isinstance(seeds, int):
        return f"seed {seeds}"
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return "seeds " + ", ".join(map(str, seeds))
