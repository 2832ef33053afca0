"""`cache-inspect fill`: compute and store every sample before training begins.

And objects named on a command line as `package.module:callable`, imported and called.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache.cache import ActivationCache
from egeria_cache.device import default_device
from egeria_cache.inspect.words import print_json
from egeria_cache.loader import EgeriaLoader


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
    add_common(parser)
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
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="of the loader")
    parser.add_argument("--name", default="train", help="of the loader; default train")
    parser.add_argument("--seed", type=int, default=0, help="of the augmentation; default 0")
    parser.add_argument(
        "--variants", type=int, metavar="K",
        help="random draws of each sample, to be kept for ever; default: those of the first epoch",
    )  # fmt: skip
    parser.add_argument("--limit", default="100GB", metavar="SIZE", help="of the cache")
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add what `plan` takes as well."""
    parser.add_argument("model", metavar="MODEL_FACTORY", help="returns the model with its weights")
    parser.add_argument(
        "--data", metavar="DATASET_FACTORY", required=True,
        help="returns a map-style data set, or a DataLoader with its collate function",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default 32")
    parser.add_argument("--codec", default="auto", help="as ActivationCache takes it")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def find(what: str, text: str) -> Callable[..., Any]:
    """Return the callable that `text` names; the current directory is searched first.

    Args:
        what: What the user calls it ("MODEL_FACTORY"), for messages.
        text: As uvicorn takes it: "package.module:callable", attributes joined by dots.

    Raises:
        ValueError: Not of this form, not importable, not there, or not callable; says what to do.
    """
    module_name, colon, attributes = text.partition(":")
    if not (module_name and colon and attributes):
        raise ValueError(
            f"{what} {text!r} is not of the form package.module:callable, such as "
            "models.resnet:make_model"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"{what} {text!r}: there is no module {error.name!r} in {os.getcwd()} nor among "
                "the installed packages; run from the directory that holds it, or install it"
            ) from error
        raise ValueError(
            f"{what} {text!r}: {module_name} imports {error.name!r}, which is not installed "
            f"({where_raised(error)})"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{what} {text!r}: importing {module_name} failed: {_named(error)}"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = difflib.get_close_matches(attribute, dir(found), n=3)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"{what} {text!r}: {module_name} has no {attribute!r}{hint}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ValueError(
            f"{what} {text!r} is a {type(found).__name__}, which cannot be called; name a function "
            "or class that takes no arguments"
        )
    result: Callable[..., Any] = found
    return result


def make(what: str, text: str) -> Any:
    """Return what the named callable returns, called without arguments.

    Raises:
        ValueError: As `find` does, or the call failed; says where.
    """
    factory = find(what, text)
    try:
        return factory()
    except Exception as error:
        raise ValueError(
            f"{what} {text!r}, called without arguments, failed: {_named(error)}"
        ) from (error)


def make_model(text: str) -> nn.Module:
    """Return the model of MODEL_FACTORY.

    Raises:
        ValueError: As `make` does, or it is no model.
    """
    model = make("MODEL_FACTORY", text)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"MODEL_FACTORY {text!r} returned a {type(model).__name__}; it must return "
            "the model, a torch.nn.Module"
        )
    return model


def where_raised(error: BaseException) -> str:
    """Return the file and line of the innermost frame."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if "importlib" not in frame.filename] or frames
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "unknown place"


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error} ({where_raised(error)})"


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
