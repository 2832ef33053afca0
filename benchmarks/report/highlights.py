"""README's results: five figures that people come for, each with its command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .parts import Report, as_fast, bytes_, ratio
from .words import command_of

__all__ = ["highlights"]

Row = tuple[str, str]


def highlights(reports: dict[str, Report]) -> str:
    """Return a Markdown table of the figures whose results are there."""
    rows = []
    for name, find in _FIGURES:
        report = reports.get(name)
        try:
            found = None if report is None else find(report)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, StopIteration):
            continue  # a file of another form is told by its section of the page
        if report is not None and found is not None:
            what, measured = found
            rows.append([what, measured, f"`{command_of(name, report.get('environment') or {})}`"])
    if not rows:
        return "\n"
    cells = [["what", "measured", "by"], ["---"] * 3, *rows]
    return "\n" + "\n".join("| " + " | ".join(row) + " |" for row in cells) + "\n\n"


def _verdict(report: Report, what: str) -> dict[str, Any]:
    return next(row for row in report["verdicts"] if row["what"].startswith(what))


def _reached(row: dict[str, Any]) -> str:
    return f"{ratio(row['measured'])} as fast" if row["measured"] else "not reached"


def _finetune(report: Report) -> Row:
    row = _verdict(report, "digits-finetune: static+cache")
    return (
        "fine-tuning, the front frozen and cached, to the metric of training everything",
        _reached(row),
    )


def _sweep(report: Report) -> Row:
    sweep = report["sweeps"]["sweep-head"]["summary"]
    return (
        "eight learning rates for a new head, over one cache of four random draws a sample",
        f"{ratio(sweep['speedup']['median'])} as fast",
    )


def _scratch(report: Report) -> Row:
    rows = [_verdict(report, f"{name}: egeria,") for name in ("digits", "source")]
    worse = [row["deviations_worse"] for row in rows]
    return (
        "from scratch, frozen by the default controller, to the metric of plain training: an image "
        "model, a language model",
        ", ".join(map(_reached, rows))
        + " (final metric "
        + ", ".join(f"{-w:+.1f}" for w in worse)
        + " of plain's deviations between seeds)",
    )


def _step(report: Report) -> Row:
    model = next(one for one in report["models"] if one["model"] == "ResNet-50")
    cell = min(model["cells"], key=lambda one: abs(one["share"] - 0.5))
    return (
        "a training step of ResNet-50 with half of its layers frozen, from the cache",
        f"{as_fast(cell['hit_vs_full'])} as fast; an oracle with the activations in memory: "
        f"{as_fast(cell['oracle_vs_full'])}; {bytes_(cell['stored_bytes'])} a sample",
    )


def _text(report: Report) -> Row:
    saved = [row["saved"] for row in report["stored"]]
    return (
        "text of many lengths, stored without its padding",
        f"{min(saved):.1f}x fewer bytes than padded to the longest",
    )


_FIGURES: tuple[tuple[str, Callable[[Report], Row]], ...] = (
    ("time_to_accuracy", _finetune),
    ("time_to_accuracy", _sweep),
    ("forward_skip", _step),
    ("ragged", _text),
    ("time_to_accuracy", _scratch),
)
