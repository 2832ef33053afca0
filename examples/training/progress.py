"""The line that shows a run at work, and a line per epoch."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor, nn

from egeria_cache import ActivationCache

__all__ = ["Progress"]

EVERY = 10
"""Steps between two looks at the loss: reading it makes the host wait for the device."""


class Progress:
    """A context manager that owns the line."""

    def __init__(
        self,
        console: Console,
        total: int,
        done: int,
        model: nn.Module,
        cache: ActivationCache | None,
    ) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[state]}"),
        )  # fmt: skip
        self._bar = Bar(*columns, console=console, disable=not console.is_terminal)
        self._console, self._model, self._cache = console, model, cache
        self._task = self._bar.add_task("training", total=total, completed=done, state="")
        self._step = done
        if 0 < done < total:
            console.print(f"going on after step {done} of {total}", highlight=False)
        elif done:
            console.print(f"all {total} steps were done before; --restart begins anew")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, epoch: int, loss: Tensor) -> None:
        """Show a step."""
        self._step += 1
        if self._bar.disable or self._step % EVERY:
            return
        state = f"loss {loss.item():.4f}  frozen {self.frozen:.0%}"
        if self._cache is not None:
            stats = self._cache.stats()
            state += f"  cache {stats.hit_rate:.0%} of {stats.hits + stats.misses}"
        self._bar.update(
            self._task, completed=self._step, description=f"epoch {epoch}", state=state
        )

    def epoch(self, epoch: int, metric: str, score: float | None, seconds: float) -> dict[str, Any]:
        """Print an epoch's line and return its figures."""
        stats = None if self._cache is None else self._cache.stats()
        fields = {
            "epoch": epoch,
            "step": self._step,
            metric: score,
            "frozen": self.frozen,
            "boundary": None if stats is None else stats.boundary,
        }
        shown = "no test part" if score is None else f"{metric} {score:.4g}"
        line = f"epoch {epoch}: {seconds:.1f} s, {shown}, {self.frozen:.0%} frozen"
        if stats is not None:
            line += f", {stats.hits} of {stats.hits + stats.misses} samples from the cache"
        self._console.print(line, highlight=False)
        return fields

    @property
    def frozen(self) -> float:
        """Part of the parameters that is frozen."""
        sizes = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        return sum(n for n, trained in sizes if not trained) / sum(n for n, _ in sizes)
