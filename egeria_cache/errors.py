"""Every error this package raises on purpose.

One small tree under `EgeriaError`. Messages say what happened, where, and what to do. Errors take a
single string, so that they survive the pickling between a DataLoader worker and the training
process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EgeriaError(Exception):
    """Base of all errors raised by Egeria."""


class StoreError(EgeriaError):
    """The cache directory cannot be used as asked."""


class ForeignError(StoreError):
    """A file or directory is not ours to use: it belongs to somebody else, or is a link."""


class BoundaryError(EgeriaError):
    """The model cannot be cut at this module."""

    @classmethod
    def unknown(cls, name: str, known: Iterable[str]) -> BoundaryError:
        """No module has this name; offer the nearest ones."""
        known = list(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
        return cls(
            f"the model has no module named {name!r}; nearest names: "
            + ", ".join(repr(candidate) for candidate in near)
        )

    @classmethod
    def escaped(cls, source: str, consumer: str) -> BoundaryError:
        """`consumer` runs on a hit but needs what `source`, which is skipped, would have made."""
        return cls(
            f"{consumer!r} reads the output of {source!r}, which is skipped when the batch "
            "comes from the cache; choose a boundary after it, or one before it"
        )

    @classmethod
    def trainable(cls, boundary: str, parameter: str) -> BoundaryError:
        """A parameter of the prefix would still be trained."""
        return cls(
            f"parameter {parameter!r} lies in the prefix up to {boundary!r} but is trainable, so a "
            "cached activation would go stale at the next optimizer step; freeze it with "
            "requires_grad_(False) and set its grad to None, or choose an earlier boundary"
        )

    @classmethod
    def mixes_samples(cls, boundary: str, module: str, error: float) -> BoundaryError:
        """A sample's activation depends on the other samples of its batch."""
        return cls(
            f"the prefix up to {boundary!r} mixes the samples of a batch (first seen at "
            f"{module!r}, largest difference {error:.3g}), so an activation cannot be cached per "
            "sample; choose an earlier boundary"
        )

    @classmethod
    def compiled_whole(cls, boundary: str) -> BoundaryError:
        """The model is one compiled graph: there is no place to enter it."""
        return cls(
            f"the model is compiled as a whole, so it cannot be entered at {boundary!r}; compile "
            "its blocks instead (`for block in model.blocks: block.compile()`)"
        )

    @classmethod
    def never_called(cls, boundary: str) -> BoundaryError:
        """The forward does not call the boundary: a container, an unused module, a generator."""
        return cls(
            f"module {boundary!r} is not called by the model's forward, so nothing marks the end "
            "of the prefix; choose a module that is called (a block, not the list that holds it), "
            "and return a list where the forward yields its parts"
        )

    @classmethod
    def another_way(cls, boundary: str, how: str) -> BoundaryError:
        """The forward did not take the recorded way through the prefix."""
        return cls(
            f"the prefix up to {boundary!r} does not always run the same way: {how}; "
            "choose a boundary before the code that branches"
        )

    @classmethod
    def impure(cls, boundary: str, what: str) -> BoundaryError:
        """The activation is not a function of the sample and the frozen weights."""
        return cls(
            f"an activation at {boundary!r} cannot be reused: {what}; choose an earlier boundary"
        )

    @classmethod
    def leaves(cls, boundary: str, what: str) -> BoundaryError:
        """A hit would not leave what a plain call does."""
        return cls.impure(
            boundary, f"{what!r} is what the prefix leaves with each call, and a hit would not"
        )

    @classmethod
    def moves(cls, boundary: str, parameter: str) -> BoundaryError:
        """A parameter is written to where a dry run or an audit would do that once more."""
        return cls(
            f"an activation at {boundary!r} cannot be reused: the forward writes to the parameter "
            f"{parameter!r}, before the boundary or for what runs before it; do that in the "
            "training loop, or behind the boundary"
        )

    @classmethod
    def shares_memory(cls, boundary: str, module: str, other: str) -> BoundaryError:
        """Two tensors that cross the cut lie in the same memory, in a way that cannot be stored."""
        return cls(
            f"what {module!r} returns lies in the memory of what {other!r} is given or returns, "
            f"and what runs behind {boundary!r} reads both, so that a write to one would not reach "
            "the other; return a copy (`.clone()`), or choose an earlier boundary"
        )

    @classmethod
    def not_proved(cls, boundary: str, why: str) -> BoundaryError:
        """The dry run did not reproduce the model's output."""
        return cls(
            f"skipping the prefix up to {boundary!r} is not possible: {why}; what runs behind it "
            "must need nothing of the prefix but the tensors that cross it: return them from "
            "there, or choose another boundary"
        )


class BatchError(BoundaryError):
    """The model can be cut there, but not for such batches, or as it is cut over ranks already."""


class PaddingError(BatchError):
    """The model can be cut there, but not for batches that are padded like this."""

    @classmethod
    def at(cls, boundary: str, why: str) -> PaddingError:
        """Say why padded batches are not cached there."""
        return cls(f"padded batches are not cached at {boundary!r}: {why}")

    @classmethod
    def reads_padding(cls, boundary: str, who: str, error: float | None = None) -> PaddingError:
        """What is computed for a sample depends on how far its batch is padded."""
        much = "" if error is None else f" (by {error:.3g} of the largest value)"
        return cls.at(
            boundary,
            f"{who} depends on what stands in the padding{much}, so that a sample differs from "
            "batch to batch; give the model a mask that everything respects, or pad all samples to "
            "one length",
        )

    @classmethod
    def unseen(cls, boundary: str) -> str:
        """Say that nothing shows whether the loop reads padding."""
        return (
            f"padded batches are not served at {boundary!r} yet: the model returns a tensor that "
            "is padded itself, and no gradient has shown that the loss leaves its padding alone "
            "(the model is called without gradients, or what it returns is detached or counts for "
            "nothing); let the "
            "model reduce it under the mask, or say ActivationCache(padding='unread') if your loop "
            "reads nothing there"
        )
