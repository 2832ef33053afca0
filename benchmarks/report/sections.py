"""Each known results file: a title, what it means, and the columns that a person decides by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cache, harm, pipelines, training
from .generic import generic_tables
from .parts import Report, Section

__all__ = ["KNOWN", "read_reports", "read_sections", "section_of"]


def read_sections(results: Path) -> list[Section]:
    """Return a section per JSON file: the known ones in their order, then the others by name.

    A file whose form a known section does not understand is shown as it is.
    """
    found = {path.stem: path for path in sorted(results.glob("*.json"))}
    order = [name for name in KNOWN if name in found]
    order += [name for name in found if name not in KNOWN]
    return [section_of(name, json.loads(found[name].read_text())) for name in order]


def read_reports(results: Path) -> dict[str, Report]:
    """Return the files that hold reports, by name."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    return {name: report for name, report in found.items() if isinstance(report, dict)}


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
        "A ResNet on handwritten digits: over a frozen front, the same with random "
        "augmentation, and from scratch; each with plain PyTorch and with Egeria.",
        training.demo,
        True,
    ),
    "time_to_accuracy": (
        "Time to accuracy",
        "Real data, several seeds, one schedule for all. Times are of the processor, all threads "
        "together, so that a cache's own are counted in full and a neighbour on the machine is "
        "not; the clock's stand beside them. A speed-up is plain PyTorch's time to its "
        "own final metric (less one standard deviation over the seeds) over the method's, of the "
        "mean curves over the seeds; the metric must hold for two evaluations in a row. In the "
        "median over the seeds, one in which a method never gets there counts as 0. What plain "
        "training reaches whose schedule is cut to the method's time stands beside it.",
        training.time_to_accuracy,
        True,
    ),
    "harm": (
        "What freezing costs, foretold",
        "Plain runs are branched at four moments: the first layers freeze, and training goes on "
        "to the end of the schedule. Harm is the final loss less that of the plain run, in nats; "
        "it is predicted from what was read before the branch. The fresh half was not looked at "
        "while thresholds were chosen. Harmful: more than 0.01.",
        harm.harm,
        False,
    ),
    "harm_scripts": (
        "What the controller costs ordinary scripts",
        "Five scripts in the shapes of public examples, changed by nothing but the controller's "
        "lines, five seeds each: final losses less those of plain training, in nats, with the "
        "scheduler given and with total_steps alone. Chance: a plain run whose weights were moved "
        "by a millionth.",
        harm.scripts,
        False,
    ),
    "forward_skip": (
        "What a skipped forward saves",
        "The paper's models at their real size, random weights, synthetic input. Beside "
        "a full training step: the front frozen and computed, the front read from the cache (all "
        "hits), and the oracle, which trains the rest alone on activations in memory.",
        cache.forward_skip,
        True,
    ),
    "skip": (
        "The cost of a hit",
        "Small models; activations in memory, so that the engine's own cost shows.",
        cache.skip,
        True,
    ),
    "small_step": (
        "The cost of a small step",
        "A few layers train on hits, the whole way from disk, beside an oracle that trains them on "
        "activations in memory; and what each part takes of the training thread.",
        cache.small_step,
        True,
    ),
    "device": (
        "A first accelerator",
        "Models of public sizes at random weights: whether training with the cache is what it is "
        "without, and a step of hits beside the oracle and a computed one.",
        cache.device,
        False,
    ),
    "short": (
        "Short trainings",
        "What a cache costs that has hardly time to win anything back: whole trainings that begin "
        "with an empty directory and with the one that they left, vs a plain DataLoader.",
        cache.short,
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
    "pipeline": (
        "Pipelines",
        "Four ranks whose blocks sleep for a unit of time, the front half frozen: the units that a "
        "batch takes, against those on paper.",
        pipelines.pipeline,
        False,
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
        "Random augmentation",
        "Fronts trained on other classes are frozen, and a head trains on augmented samples: with "
        "fresh draws in every epoch by plain PyTorch, with draws that are used for some epochs, "
        "and with features augmented instead. Factors are of processor time, vs fresh draws.",
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
