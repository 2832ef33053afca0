"""One file that holds all that the next step depends on; written whole, or not at all."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from egeria_cache.device import random_states, set_random_states
from training.ranks import Ranks

__all__ = ["Checkpoint", "CheckpointError", "Stateful"]

VERSION = 2


class CheckpointError(Exception):
    """A checkpoint cannot be read, or belongs to another run."""


class Stateful(Protocol):
    """Anything that can be put back: a model, an optimizer, a loader, a controller."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Checkpoint:
    """Saves and restores the parts of a run, and the global random generators.

    Args:
        path: The file.
        identity: Settings that must be the same when the run goes on.
        parts: The same in all processes. Restored in this order: the model before what depends on
            its weights.
        own: Of each process its own.
        ranks: The processes.
    """

    def __init__(
        self,
        path: Path,
        identity: dict[str, Any],
        parts: dict[str, Stateful],
        own: dict[str, Stateful],
        ranks: Ranks,
    ) -> None:
        self.path, self.identity = path, {**identity, "processes": str(ranks.world)}
        self.parts, self.own, self.ranks = parts, own, ranks

    def save(self, *, log: int, **progress: int) -> None:
        """Write everything; a kill at any instant leaves the old file or the new one.

        Called by all processes; the first one writes.
        """
        mine = {name: part.state_dict() for name, part in self.own.items()}
        own = self.ranks.gather({"parts": mine, "random": _random_state(), "log": log})
        if self.ranks.is_first:
            self._write(progress, own)

    def _write(self, progress: dict[str, int], own: list[Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        content = {
            "version": VERSION,
            "identity": self.identity,
            "progress": progress,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "own": own,
        }
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name too must outlive a crash of the machine
        finally:
            os.close(directory)

    def load(self) -> dict[str, int] | None:
        """Put everything back and return what `save` was told; None if there is no checkpoint.

        Raises:
            CheckpointError: The file is damaged, or was written under other settings.
        """
        if not self.path.exists():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            version = content["version"]
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error}); delete it, or begin anew with --restart"
            ) from error
        if version != VERSION:
            raise CheckpointError(
                f"{self.path} was written by another release (version {version}, this one reads "
                f"{VERSION}); begin anew with --restart"
            )
        self._check(content["identity"])
        for name, part in self.parts.items():
            part.load_state_dict(content["parts"][name])
        mine = content["own"][self.ranks.rank]
        for name, part in self.own.items():
            part.load_state_dict(mine["parts"][name])
        _set_random_state(mine["random"])
        progress: dict[str, int] = content["progress"]
        return {**progress, "log": mine["log"]}

    def _check(self, found: dict[str, Any]) -> None:
        names = sorted(found.keys() | self.identity.keys())
        changed = [
            f"--{name.replace('_', '-')} was {found.get(name)}, is {self.identity.get(name)}"
            for name in names
            if found.get(name) != self.identity.get(name)
        ]
        if changed:
            raise CheckpointError(
                f"{self.path} belongs to a run with other settings ({'; '.join(changed)}). Go on "
                "with the old ones, give another --output, or begin anew with --restart"
            )


def _random_state() -> dict[str, Any]:
    kind, words, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": list(random_states()),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    set_random_states(state.get("device", ()))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
