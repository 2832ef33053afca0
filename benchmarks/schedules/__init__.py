"""Schedules of pipelines on paper: how long they take with a frozen front, and how that looks.

    python -m benchmarks.schedules --schedule GPipe --stages 4 --microbatches 6 --frozen 2 -o x.png

`orders` is what each rank runs, `bubbles` how long that takes, `drawing` how it looks. Pure.
"""

from .bubbles import LAYOUTS, Bubbles, Layout, Slot, count_bubbles, count_plan
from .orders import Task, rank_order

__all__ = [
    "LAYOUTS", "Bubbles", "Layout", "Slot", "Task", "count_bubbles", "count_plan", "rank_order",
]  # fmt: skip
