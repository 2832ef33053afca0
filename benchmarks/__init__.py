"""Benchmarks: `python -m benchmarks` runs them, `python -m benchmarks.NAME` one of them.

NAME is also the name of what it writes to `results`. Several of them share `harness` (turns,
medians, machine, output), `digits_task` (real data), `models` (the paper's), and `examples`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
