"""`cache-inspect fill`: compute and store every sample before training begins."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from egeria_cache.cache import ActivationCache
from egeria_cache.inspect.factories import find, make, make_model
from egeria_cache.inspect.plan_command import device_of_name
from egeria_cache.inspect.words import print_json
from egeria_cache.loader import EgeriaLoader

__all__ = ["fill"]


def fill(argv: list[str]) -> int:
    """Run `cache-inspect fill` with the arguments behind that word; 0 if everything is stored.

    Raises:
        ValueError: A factory, the model or the data cannot be used; says what to do.
        EgeriaError: The model cannot be cut there, or the directory cannot be used.
        SystemExit: argparse has printed help, or a mistake.
    """
    options = _parser().parse_args(argv)
    model = make_model(options.model)
    model.to(device_of_name(options.device))
    data = make("--data", options.data)
    forward = (
        None if options.forward is None else partial(find("--forward", options.forward), model)
    )
    with ActivationCache(
        model, options.directory, options.boundary, limit=options.limit, codec=options.codec,
        gate="always",
    ) as cache:  # fmt: skip
        report = cache.fill(_loader(data, cache, options), forward, progress=not options.json)
    if options.json:
        print_json(
            {
                "samples": report.num_samples,
                "stored": report.num_stored,
                "why_not": report.why_not,
            }
        )
    else:
        print(report)
    return 0 if report.num_stored == report.num_samples else 1


def _loader(data: Any, cache: ActivationCache, options: argparse.Namespace) -> EgeriaLoader[Any]:
    """Return a loader of the data set as the training script's is, as far as it can be told."""
    settings: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers}
    if isinstance(data, DataLoader):
        settings |= {"collate_fn": data.collate_fn}
        data = data.dataset
    try:
        len(data)
    except TypeError:
        raise ValueError(
            f"--data {options.data!r} returned a {type(data).__name__} without a length; it must "
            "return a map-style data set, or a DataLoader of one"
        ) from None
    return EgeriaLoader(
        data, cache=cache, name=options.name, seed=options.seed,
        **({} if options.variants is None else _for_ever(options.variants)), **settings,
    )  # fmt: skip


def _for_ever(variants: int) -> dict[str, Any]:
    return {"reuse": None, "augmentation_variants": variants}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cache-inspect fill",
        description="Compute and store what a frozen prefix gives for every sample, once. A run "
        "that was stopped or killed goes on where it was; several may fill at the same time.",
        epilog="MODEL_FACTORY and DATASET_FACTORY are package.module:callable, called without "
        "arguments; the current directory is searched first. Weights, data set, collate function, "
        "name and seed must be those of the training script.",
    )
    parser.add_argument(
        "model", metavar="MODEL_FACTORY", help="returns the model with its weights, partly frozen"
    )
    parser.add_argument(
        "--data", metavar="DATASET_FACTORY", required=True,
        help="returns a map-style data set, or a DataLoader with its collate function",
    )  # fmt: skip
    parser.add_argument(
        "--directory", type=Path, required=True, metavar="DIR", help="where the activations live"
    )
    parser.add_argument(
        "--boundary", default="auto", metavar="NAME",
        help="the last frozen module; default: the deepest one before which nothing trains",
    )  # fmt: skip
    parser.add_argument(
        "--forward", metavar="CALL", help="package.module:callable, (model, batch) -> anything: "
        "calls the model as training does; default: a mapping by name, else the batch's first part",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default 32")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="of the loader")
    parser.add_argument("--name", default="train", help="of the loader; default train")
    parser.add_argument("--seed", type=int, default=0, help="of the augmentation; default 0")
    parser.add_argument(
        "--variants", type=int, metavar="K",
        help="random draws of each sample, to be kept for ever; default: those of the first epoch",
    )  # fmt: skip
    parser.add_argument("--limit", default="100GB", metavar="SIZE", help="of the cache")
    parser.add_argument("--codec", default="auto", help="as ActivationCache takes it")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    return parser
