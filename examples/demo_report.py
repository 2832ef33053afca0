"""What the demo shows: bars with live speed, a sentence per act, one table and one figure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo_runs import Act, Record
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

__all__ = [
    "Bar", "Board", "cost", "difference", "predicted", "print_story", "save_figure", "speedup",
]  # fmt: skip

Result = dict[str, Any]


class Bar:
    """The progress of one run."""

    def __init__(self, progress: Progress, task: TaskID, epochs: int) -> None:
        self._progress, self._task, self._epochs = progress, task, epochs
        self._samples, self._steps = 0, 0

    def advance(self, samples: int, seconds: float) -> None:
        """One more step; `seconds` of training so far, of `samples` more."""
        self._samples += samples
        self._progress.update(
            self._task, advance=samples, seconds=f"{seconds:5.1f} s",
            speed=f"{self._samples / max(seconds, 1e-9):6,.0f} samples/s",
        )  # fmt: skip

    def evaluated(self, record: Record) -> None:
        """An epoch is over."""
        epoch = len(record.seconds)
        if epoch == 1:  # now it is known how long an epoch is
            self._progress.update(self._task, total=record.samples * self._epochs)
        self._progress.update(self._task, accuracy=f"{record.accuracies[-1]:6.1%} right")

    def resumed(self, record: Record) -> None:
        """Show what an earlier process has done."""
        self._samples = record.samples
        self._progress.update(self._task, completed=record.samples)
        self._progress.update(
            self._task, total=record.samples * self._epochs / len(record.seconds),
            seconds=f"{record.seconds[-1]:5.1f} s",
        )  # fmt: skip
        self.evaluated(record)


class Board:
    """The screen."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._number = 0

    @contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show one bar for something that is not compared."""
        columns = TextColumn("{task.description}"), BarColumn()
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)

    @contextmanager
    def act(self, act: Act, names: list[str]) -> Iterator[list[Bar]]:
        """Show both runs of an act, one below the other."""
        self._number += 1
        self.console.print(f"\n[bold]{self._number}. {act.title}[/bold]")
        self.console.print(act.about, style="dim")
        columns = (
            TextColumn("   {task.description:<14}"), BarColumn(30),
            TextColumn("{task.fields[seconds]:>8}"), TextColumn("{task.fields[speed]:>17}"),
            TextColumn("{task.fields[accuracy]:>13}"),
        )  # fmt: skip
        with Progress(*columns, console=self.console) as progress:
            tasks = [
                progress.add_task(name, total=None, seconds="", speed="", accuracy="")
                for name in names
            ]
            yield [Bar(progress, task, act.epochs) for task in tasks]

    def sentence(self, result: Result) -> None:
        """Say what an act has shown."""
        self.console.print(Padding(_sentence(result), (0, 0, 0, 3)), highlight=False)


def speedup(result: Result) -> float:
    """Return plain training time over Egeria's, of one act."""
    return float(result["plain"]["seconds"][-1] / result["egeria"]["seconds"][-1])


def _sentence(result: Result) -> str:
    egeria = result["egeria"]
    text = f"[bold]{speedup(result):.2f}x[/bold] as fast; "
    if result["act"]["is_finetuning"]:
        hits = f"{egeria['hits']:,} of {egeria['samples']:,} samples came from the cache"
        so = _accuracies(result) if result["act"]["augments"] else _equality(result)
        return text + f"{hits} ({egeria['bytes_on_disk'] / 1e6:.1f} MB); {so}."
    moves = [move for move in egeria["moves"] if move["boundary"] is not None]
    if not moves:
        return text + "nothing was worth freezing."
    return text + (
        f"frozen in {len(moves)} move{'s' * (len(moves) > 1)} up to {moves[-1]['boundary']}; "
        f"predicted cost {predicted(result):.4f} nats, measured {cost(result):+.4f}."
    )


def _accuracies(result: Result) -> str:
    plain, egeria = (result[key]["accuracies"][-1] for key in ("plain", "egeria"))
    return f"{egeria:.1%} of the held-out images are right, {plain:.1%} with fresh draws"


def _equality(result: Result) -> str:
    largest = difference(result)
    if largest == 0:
        return "every loss is equal to the bit"
    return f"no loss differs by more than {largest:.1g}"


def difference(result: Result) -> float:
    """Return by how much the losses of the two runs differ at most, step by step."""
    pairs = zip(result["plain"]["losses"], result["egeria"]["losses"], strict=True)
    return float(max(abs(a - b) for a, b in pairs))


def predicted(result: Result) -> float:
    """Return what the controller said that its moves would cost, in nats."""
    return float(result["egeria"]["predicted"])


def cost(result: Result) -> float:
    """Return how much higher the final test loss is than plain's, in nats."""
    return float(result["egeria"]["test_losses"][-1] - result["plain"]["test_losses"][-1])


def print_story(console: Console, result: Result, out: Path) -> None:
    """Print the table, where the figure is, and what to try next."""
    table = Table(title="\nPlain PyTorch and Egeria, same seeds and schedules")
    for name in ("", "plain", "Egeria", "", "accuracy", "from the cache"):
        table.add_column(name, justify="left" if not table.columns else "right")
    for one in result["acts"]:
        plain, egeria = one["plain"], one["egeria"]
        table.add_row(
            one["act"]["title"],
            f"{plain['seconds'][-1]:.1f} s",
            f"{egeria['seconds'][-1]:.1f} s",
            f"[bold]{speedup(one):.2f}x[/bold]",
            f"{plain['accuracies'][-1]:.1%}, {egeria['accuracies'][-1]:.1%}",
            f"{egeria['hits'] / egeria['samples']:.0%}",
        )
    console.print(table)
    console.print(f"The figure: {out / 'demo.png'}; the numbers: {out / 'demo.json'}\n")
    console.print("To try next:")
    for command, what in (
        (f"{_tool('cache-inspect')} {out / 'state' / 'cache-finetune'}", "what the cache holds"),
        (f"{_tool('python')} examples/finetune_text.py", "BERT on text that is padded"),
    ):  # fmt: skip
        # Not wrapped and not coloured: these are to be copied.
        console.print(f"  {command}", highlight=False, soft_wrap=True)
        console.print(f"      {what}", style="dim")


def _tool(name: str) -> str:
    """Return how a command of this environment is called from here."""
    own = Path(sys.executable).parent / name
    if not own.exists():
        return name
    try:
        return str(own.relative_to(Path.cwd()))
    except ValueError:
        return str(own)


def save_figure(path: Path, result: Result) -> None:
    """Save one picture: held-out accuracy against training time, an act a panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    acts = result["acts"]
    size = 5 * len(acts), 4.2
    figure, panels = plt.subplots(
        1, len(acts), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    lowest = min(min(one[key]["accuracies"]) for one in acts for key in ("plain", "egeria"))
    bottom = max(0.0, min(lowest, 0.8) - 0.03)
    for panel, one in zip(panels[0], acts, strict=True):
        for key, colour in (("plain", "tab:gray"), ("egeria", "tab:green")):
            run = one[key]
            panel.plot(run["seconds"], run["accuracies"], color=colour, linewidth=2)
            end = run["seconds"][-1], run["accuracies"][-1]
            panel.plot(*end, "o", color=colour)
            panel.annotate(
                f"{run['name']}\n{end[0]:.1f} s", end, xytext=(4, 8), color=colour, ha="right",
                textcoords="offset points", va="bottom",
            )  # fmt: skip
        panel.set(xlabel="training time [s]", ylim=(bottom, 1 + 0.18 * (1 - bottom)))
        panel.set_yticks([tick for tick in panel.get_yticks() if bottom <= tick <= 1])
        panel.set_xlim(0, None)
        panel.set_title(f"{one['act']['title']}: {speedup(one):.2f}x", fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("held-out images classified right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
