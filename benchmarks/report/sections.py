"""Each known results file: a title, what it means, and the columns that a person decides by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cache, training
from .generic import generic_tables
from .parts import Report, Section

__all__ = ["KNOWN", "read_sections", "section_of"]


def read_sections(results: Path) -> list[Section]:
    """Return a section per JSON file: the known ones in their order, then the others by name.

    A file whose form a known section does not understand is shown as it is.
    """
    found = {path.stem: path for path in sorted(results.glob("*.json"))}
    order = [name for name in KNOWN if name in found]
    order += [name for name in found if name not in KNOWN]
    return [section_of(name, json.loads(found[name].read_text())) for name in order]


def section_of(name: str, report: Report) -> Section:
    """Return what is shown of one report."""
    section = Section(name=name, title=name.replace("_", " ").capitalize(), about="")
    section.environment = _environment(report)
    if name in KNOWN:
        section.title, section.about, fill, section.short = KNOWN[name]
        try:
            fill(section, report)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            section.findings = [
                f"This file has another form than expected ({type(error).__name__}: {error}); "
                "it is shown as it is."
            ]
            section.tables, section.short = [], False
    if not section.tables:
        section.tables = generic_tables(report)
    return section


def _environment(report: Any) -> dict[str, Any]:
    if not isinstance(report, dict):
        return {}
    own = report.get("environment") or report.get("machine")
    if own is None and isinstance(report.get("models"), list) and report["models"]:
        own = report["models"][0].get("environment")
    return dict(own) if isinstance(own, dict) else {}


KNOWN: dict[str, tuple[str, str, Callable[[Section, Report], None], bool]] = {
    "demo": (
        "The demo",
        "A ResNet on handwritten digits, trained three times with the same seeds and schedule.",
        training.demo,
        True,
    ),
    "time_to_accuracy": (
        "Time to accuracy",
        "Real data, several seeds, one schedule for all. A speed-up is plain PyTorch's time to its "
        "own final metric (less one standard deviation over the seeds) over the method's; a seed "
        "in which a method never gets there counts as 0.",
        training.time_to_accuracy,
        True,
    ),
    "forward_skip": (
        "What a skipped forward saves",
        "The paper's models at their real size, random weights, synthetic input. Times are parts "
        "of a full training step: the front frozen and computed, the front read from the cache "
        "(all hits), and the oracle, which trains the rest alone on activations in memory.",
        cache.forward_skip,
        True,
    ),
    "skip": (
        "The cost of a hit",
        "Small models; activations in memory, so that the engine's own cost shows.",
        cache.skip,
        True,
    ),
    "store": (
        "The store",
        "Random batches of activations, read and written beside other ways to keep them; the "
        "contestants take turns.",
        cache.store,
        True,
    ),
    "loader": (
        "The loader",
        "Beside its peers, in turns, with a data set that costs next to nothing and one that does "
        "not.",
        cache.loader,
        True,
    ),
    "ragged": (
        "Padded text",
        "Docstrings of the standard library, padded to the longest of each batch: bytes of a "
        "sample, and epochs of hits beside an oracle that has the activations in memory.",
        cache.ragged,
        False,
    ),
    "controller": (
        "The controller",
        "What deciding costs the training thread, and how fast the references are.",
        training.controller,
        True,
    ),
    "variants": (
        "Cached versions of each sample",
        "The front is frozen, the rest trains on with K cached versions of each augmented sample, "
        "and with fresh ones in every epoch.",
        cache.variants,
        False,
    ),
    "sensitivity": (
        "The controller's options",
        "Accuracy and the part of the model that is trained on average, per setting.",
        training.sensitivity,
        False,
    ),
    "plasticity_validation": (
        "Plasticity against other measures",
        "Rank correlation over the epochs of SP plasticity with the distance to the final weights "
        "in PWCCA and CKA.",
        training.plasticity_validation,
        False,
    ),
}
