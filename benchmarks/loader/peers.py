"""The loaders that this benchmark sets side by side, and the data they load.

A contestant is made for a data set and gives epochs of (images, targets), both tensors. One that
cannot be had here says why.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache, EgeriaLoader

__all__ = ["CONTESTANTS", "Cheap", "Expensive", "MissingPeerError", "make"]

BATCH = 64
CONTESTANTS = (
    "DataLoader",
    "StatefulDataLoader",
    "LitData",
    "Grain",
    "EgeriaLoader, cache=None",
    "EgeriaLoader, nothing frozen",
)


class MissingPeerError(Exception):
    """This contestant cannot be had here; the text says why."""


class Cheap(Dataset[tuple[Tensor, int]]):
    """Images in memory, (3, 32, 32): a sample costs a few microseconds."""

    def __init__(self, num_samples: int) -> None:
        self.images = torch.randn(num_samples, 3, 32, 32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 10


class Expensive(Dataset[tuple[Tensor, int]]):
    """JPEG files in memory: decoded, cropped at random, resized to 32x32, flipped at random."""

    def __init__(self, num_samples: int) -> None:
        from PIL import Image

        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(num_samples):
            small = Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8))
            file = io.BytesIO()
            small.resize((224, 224), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decode(self.files[index]), index % 10


def decode(file: bytes) -> Tensor:
    """Decode and augment one image; random numbers come from torch's global generator."""
    from PIL import Image

    image = Image.open(io.BytesIO(file)).convert("RGB")
    left, top, flip = torch.randint(0, 33, (3,)).tolist()
    image = image.resize((32, 32), Image.Resampling.BILINEAR, (left, top, left + 192, top + 192))
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
    return pixels.flip(2) if flip > 16 else pixels


def make(
    name: str, data: Any, directory: Path, *, workers: int = 0, cache: ActivationCache | None = None
) -> Any:
    """Return the contestant `name` over `data`: iterable, one epoch a pass.

    Raises:
        MissingPeerError: It is not installed, or cannot do this.
    """
    if name == "LitData":
        return _litdata(data, directory, workers)
    if name == "Grain":
        return _grain(data, workers)
    kwargs: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
    if workers:
        kwargs["persistent_workers"] = True
    if name == "DataLoader":
        return DataLoader(data, **kwargs)
    if name == "StatefulDataLoader":
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError as error:
            raise MissingPeerError(f"torchdata: {error}") from error
        return StatefulDataLoader(data, **kwargs)
    if name == "EgeriaLoader, cache=None":
        return EgeriaLoader(data, **kwargs)
    return EgeriaLoader(data, cache=cache, seed=0, **kwargs)


class _GrainEpochs:
    """A new Grain loader for each epoch: its sampler counts epochs itself."""

    def __init__(self, data: Any, workers: int) -> None:
        self.data, self.workers, self.epoch = data, workers, 0

    def __iter__(self) -> Iterator[Any]:
        import grain

        self.epoch += 1
        sampler = grain.samplers.IndexSampler(
            len(self.data), shuffle=True, seed=self.epoch, num_epochs=1
        )
        loader = grain.DataLoader(
            data_source=_ArraySource(self.data),
            sampler=sampler,
            operations=[grain.transforms.Batch(BATCH)],
            worker_count=self.workers,
        )
        self.iterator = iter(loader)
        for images, targets in self.iterator:
            yield torch.from_numpy(images), torch.from_numpy(targets)

    def state_dict(self) -> Any:
        """Return the state of the pass that is running."""
        return self.iterator.get_state()


class _ArraySource:
    """Grain batches NumPy arrays."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, target = self.data[index]
        return (image.numpy() if isinstance(image, Tensor) else image), target


def _grain(data: Any, workers: int) -> Any:
    with _quietly():
        try:
            import grain  # noqa: F401
        except ImportError as error:
            raise MissingPeerError(f"grain: {error}") from error
    return _GrainEpochs(data, workers)


def _litdata(data: Any, directory: Path, workers: int) -> Any:
    """LitData streams from files of its own, written beforehand."""
    with _quietly():
        try:
            import litdata
        except ImportError as error:
            raise MissingPeerError(f"litdata: {error}") from error
        if not isinstance(data, Cheap | Expensive):
            raise MissingPeerError(
                "LitData reads its own files, which would have to be written first"
            )
        is_cheap = isinstance(data, Cheap)
        raw: Any = data.images if isinstance(data, Cheap) else data.files
        chosen: Callable[[int], Any] = _Pick(raw)
        litdata.optimize(
            fn=chosen, inputs=list(range(len(data))), output_dir=str(directory), num_workers=1,
            chunk_bytes="64MB",
        )  # fmt: skip

        class Streamed(litdata.StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, index: Any) -> Any:
                value, index = super().__getitem__(index)
                return value if is_cheap else decode(value), index % 10

        return litdata.StreamingDataLoader(
            Streamed(str(directory), shuffle=True, seed=0), batch_size=BATCH, num_workers=workers
        )


class _Pick:
    """LitData calls it in another process."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def __call__(self, index: int) -> tuple[Any, int]:
        value = self.raw[index]
        return (value.clone() if isinstance(value, Tensor) else value), index


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Swallow progress bars, also those of child processes."""
    saved = os.dup(1), os.dup(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(silent, stream)
        yield
    finally:
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(silent)
