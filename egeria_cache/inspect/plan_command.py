"""`cache-inspect plan`: per boundary, what a cache would hold, save and cost, before training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from egeria_cache.config import parse_size
from egeria_cache.device import default_device
from egeria_cache.inspect.factories import find, make, make_model
from egeria_cache.inspect.forecast import Settings, forecast
from egeria_cache.inspect.harm import ADVISER, Advice, Wish, advice_as_json, ask
from egeria_cache.inspect.ordinary import ordinary_step
from egeria_cache.inspect.prospect import Forecast, Prospect
from egeria_cache.inspect.words import console, fitting, print_json, share, size
from egeria_cache.samples import DEFAULT_REUSE

__all__ = ["device_of_name", "plan"]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def plan(argv: list[str]) -> int:
    """Run `cache-inspect plan` with the arguments behind that word; return 0.

    Raises:
        ValueError: A factory, the model or the data cannot be used; says what to do.
        SystemExit: argparse has printed help, or a mistake.
    """
    options = _parser().parse_args(argv)
    model = make_model(options.model)
    settings = Settings(
        batch_size=options.batch_size,
        num_samples=options.samples,
        step=ordinary_step if options.step is None else find("--step", options.step),
        device=device_of_name(options.device),
        autocast=AUTOCAST.get(options.autocast),
        boundaries=options.boundaries,
        codec=options.codec,
        variants=options.variants,
        reuse=options.reuse or None,
        limit_bytes=None if options.limit is None else parse_size(options.limit),
        scratch=options.scratch,
    )
    data = make("--data", options.data)
    wish = _wish(options)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        console=Console(stderr=True), transient=True,
        disable=options.json or not sys.stderr.isatty(),
    )  # fmt: skip
    with progress:
        task = progress.add_task("measuring", total=None)

        def advance(boundary: str, done: int, total: int) -> None:
            progress.update(task, description=boundary, completed=done, total=total)

        found = forecast(model, data, settings, advance)
        if wish is not None:
            progress.update(task, description="training copies", total=None)
        advice = None if wish is None else ask(model, data, settings, wish)
    if options.json:
        print_json(found.as_json() | ({} if advice is None else {"harm": advice_as_json(advice)}))
    else:
        _show(found, advice)
    return 0


def _wish(options: argparse.Namespace) -> Wish | None:
    """Return how to ask for harm; None if nobody wants to know.

    Raises:
        ValueError: What the copies are to be trained with is not said.
    """
    if options.harm is None:
        return None
    if options.harm < 2:
        raise ValueError(f"--harm needs at least 2 steps for each trial, got {options.harm}")
    if options.optimizer is None or options.step is None:
        raise ValueError(
            "--harm trains copies of the model: give --optimizer package.module:callable, called "
            "with the parameters, and --step package.module:callable, the training's own loss"
        )
    validate = None if options.validate is None else find("--validate", options.validate)
    return Wish(
        adviser=find("--adviser", options.adviser),
        steps=options.harm,
        optimizer=find("--optimizer", options.optimizer),
        validate=validate,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect plan",
        description="Measure, per possible boundary, what a cache would hold, save and cost.",
        epilog="MODEL_FACTORY and DATASET_FACTORY are package.module:callable, called without "
        "arguments; the current directory is searched first.",
    )
    parser.add_argument("model", metavar="MODEL_FACTORY", help="returns the model to be trained")
    parser.add_argument(
        "--data", metavar="DATASET_FACTORY", required=True,
        help="returns a map-style data set, or a DataLoader with its collate function",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default 32")
    parser.add_argument(
        "--samples", type=int, default=64, metavar="N",
        help="to measure with, spread over the data set; default 64, at least two batches",
    )  # fmt: skip
    parser.add_argument(
        "--step", metavar="STEP", help="package.module:callable, (model, batch) -> loss; default: "
        "the inputs that the forward requires, and the model's own loss or its mean square",
    )  # fmt: skip
    parser.add_argument("--boundaries", metavar="REGEX", help="try the modules with such names")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--autocast", choices=sorted(AUTOCAST), help="train under autocast")
    parser.add_argument("--codec", default="auto", help="as ActivationCache takes it")
    parser.add_argument(
        "--variants", type=int, default=1, metavar="K", help="augmented versions to be cached"
    )
    parser.add_argument(
        "--reuse", type=int, default=DEFAULT_REUSE, metavar="EPOCHS",
        help="for how many epochs a random draw of a sample would be used, if samples draw; 0: for "
        f"ever; default {DEFAULT_REUSE}",
    )  # fmt: skip
    parser.add_argument("--limit", metavar="SIZE", help="of the planned cache ('100GB')")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR",
        help="an existing directory on the disk that the cache will use; what is written there is "
        "removed; default: where temporary files go",
    )  # fmt: skip
    parser.add_argument(
        "--harm", type=int, metavar="STEPS", help="also train copies for so many steps, with and "
        "without each front frozen, and tell what that costs; needs --step and --optimizer",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", metavar="OPTIMIZER", help="of --harm: package.module:callable, called with "
        "the parameters, returns the training's optimizer",
    )  # fmt: skip
    parser.add_argument(
        "--validate", metavar="METRIC", help="of --harm: package.module:callable, called with a "
        "model, returns the metric, the higher the better; default: the loss on samples held out",
    )  # fmt: skip
    parser.add_argument("--adviser", default=ADVISER, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    return parser


def device_of_name(name: str | None) -> torch.device:
    """Return the device that an option names; by default an accelerator if there is one.

    Raises:
        ValueError: It cannot be used.
    """
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name!r} cannot be used: {error}") from error
    return device


def _show(found: Forecast, advice: Advice | None) -> None:
    out = console()
    out.print(f"[bold]{_recommendation(found)}[/]", soft_wrap=True)
    out.print(
        f"{found.model} on {found.device}, batches of {found.batch_size}, measured with "
        f"{found.num_measured:,} of {found.num_samples:,} samples"
        + (f" in {found.variants} variants" if found.variants > 1 else "")
    )
    columns = _COLUMNS if advice is None else {**_COLUMNS, "harm": "right"}
    rows = [
        [*_row(found, one), *([] if advice is None else [_harm(advice, one.boundary)])]
        for one in found.prospects
    ]
    out.print(fitting(out, columns, rows, drop=("codec", "a sample", "forward", "stored")))
    if advice is not None:
        out.print(str(advice).splitlines()[-1], markup=False, soft_wrap=True)
    for line in _notes(found):
        out.print(line, markup=False, soft_wrap=True)


def _recommendation(found: Forecast) -> str:
    best = found.recommended()
    if best is None:
        return "no cut pays: see why below"
    epoch = found.break_even_epoch(best)
    return (
        f"cut at {best.boundary}: epochs after the first take {found.later_epochs(best):.2f}x, "
        f"{size(found.set_bytes(best))}, pays from epoch {epoch:,}"
    )


_COLUMNS: dict[str, JustifyMethod] = {
    "boundary": "left", "a sample": "right", "stored": "right", "codec": "left",
    "the set": "right", "forward": "right", "step": "right", "even after": "left",
}  # fmt: skip


def _row(found: Forecast, one: Prospect) -> list[str | Text]:
    if one.refused is not None:
        return [one.boundary, *["-"] * (len(_COLUMNS) - 2), Text("refused", "red")]
    epoch, fits = found.break_even_epoch(one), found.fits(one)
    return [
        one.boundary,
        size(one.raw_bytes),
        size(one.stored_bytes),
        one.codec or "-",
        size(found.set_bytes(one)) + (f" ({share(fits)} fits)" if fits < 1 else ""),
        _known(one.forward_skipped, one.forward_error),
        _known(one.step_skipped, one.step_error),
        Text("never", "yellow") if epoch is None else Text(f"epoch {epoch:,}", "green"),
    ]


def _known(value: float, error: float) -> str:
    """Write a share and its interval."""
    return f"{100 * value:.0f} ± {100 * min(error, 9.99):.0f} %"


def _harm(advice: Advice, boundary: str) -> str:
    """Write what freezing up to there costs; a boundary that ends no layer has not been tried."""
    one = next((trial for trial in advice.trials if trial.boundary == boundary), None)
    if one is None:
        return "-"
    return f"{one.harm:+.4f}" + ("" if one.harm_error is None else f" ± {one.harm_error:.4f}")


def _notes(found: Forecast) -> list[str]:
    notes = [f"{one.boundary} is refused: {one.refused}" for one in found.prospects if one.refused]
    notes += [
        f"{one.boundary}: gate='auto' would cut at {one.cut_at}, whose output is smaller"
        for one in found.prospects
        if one.refused is None and one.cut_at not in (None, one.boundary)
    ]
    if found.reuse is not None:
        notes.append(
            f"samples draw random numbers, and each draw would be used for {found.reuse} epochs: "
            f"{share(found.fresh)} of every epoch after the first are computed and written anew, "
            "which the times of later epochs and 'even after' count."
        )
    if found.mean_lengths is not None:
        shown = ", ".join(dict.fromkeys(f"{one:.3g}" for one in found.mean_lengths))
        notes.append(
            f"samples are padded and stored at their own lengths, {shown} on average over the data "
            "set: bytes are of such a sample, times are of the samples measured with."
        )
    notes.append(
        "forward, step: what a hit skips of them, against the same step with the prefix frozen and "
        "no cache, and how far that may be off. even after: the epoch in which the time for "
        "proving, writing and reading has been won back, all of it counted in full. A hit "
        "also saves loading its sample "
        f"({found.load_s * 1e3:.2g} ms in one process), which is not counted."
    )
    return notes
