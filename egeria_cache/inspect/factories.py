"""Objects named on a command line as `package.module:callable`, imported and called."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["find", "make", "make_model", "where_raised"]


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
