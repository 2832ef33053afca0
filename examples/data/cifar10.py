"""CIFAR-10 (Krizhevsky 2009) in its binary or its Python version, unpacked."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.files import DataError, digest, first_present
from data.images import MEAN, STD, crop_and_flip

__all__ = ["Cifar10"]

ROW_BYTES = 1 + 3 * 32 * 32
FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
REMEDY = (
    "Fetch cifar-10-binary.tar.gz (or cifar-10-python.tar.gz) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpack it, and give the folder that holds "
    "data_batch_1.bin (or data_batch_1)"
)


class Cifar10(Dataset[tuple[Tensor, int]]):
    """Images, float32 (3, 32, 32), and classes 0-9; the whole set is kept in memory as bytes.

    Args:
        root: The folder of the batches, or the one it was unpacked in.
        train: The five training batches, shifted and mirrored at random; or the test batch.

    Raises:
        DataError: A batch is missing, cut short, or no CIFAR-10.
    """

    num_classes = 10

    def __init__(self, root: Path, *, train: bool) -> None:
        self.train = train
        stems = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
        images, targets, self._ids = [], [], []
        contents = []
        for stem in stems:
            found = [root / folder / (stem + end) for folder in FOLDERS for end in (".bin", "")]
            path = first_present(found, f"CIFAR-10's {stem}", REMEDY)
            content = path.read_bytes()
            pixels, labels = (_from_binary if path.suffix else _from_pickle)(path, content)
            images.append(pixels)
            targets += labels
            self._ids += [(stem, row) for row in range(len(labels))]
            contents.append(content)
        self.images = torch.cat(images)
        self.targets = targets
        self._content = digest(*contents)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = (self.images[index] / 255 - MEAN) / STD
        return (crop_and_flip(image) if self.train else image), self.targets[index]

    def sample_id(self, index: int) -> tuple[str, int]:
        """Batch and row, whichever version of the files they were read from."""
        return self._ids[index]

    def fingerprint(self) -> str:
        """The whole content: it has been read anyway."""
        return f"{self._content} augmented={self.train}"


def _from_binary(path: Path, content: bytes) -> tuple[Tensor, list[int]]:
    if not content or len(content) % ROW_BYTES:
        raise DataError(
            f"{path} has {len(content)} bytes, which is no whole number of rows of {ROW_BYTES}: "
            "it is cut short, or not CIFAR-10 (CIFAR-100 has two labels a row). Unpack it again"
        )
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, ROW_BYTES)
    return _checked(path, rows[:, 1:], rows[:, 0].tolist())


def _from_pickle(path: Path, content: bytes) -> tuple[Tensor, list[int]]:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        named = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        data, labels = np.asarray(named["data"]), [int(label) for label in named["labels"]]
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{path} is no batch of CIFAR-10's Python version "
            f"({type(error).__name__}: {error}); unpack it again"
        ) from None
    if data.dtype != np.uint8 or data.shape != (len(labels), ROW_BYTES - 1):
        raise DataError(
            f"{path} holds {data.dtype} of shape {data.shape} and {len(labels)} labels, "
            f"not bytes of shape ({len(labels)}, {ROW_BYTES - 1}); unpack it again"
        )
    return _checked(path, torch.from_numpy(data.copy()), labels)


def _checked(path: Path, rows: Tensor, labels: list[int]) -> tuple[Tensor, list[int]]:
    if not labels or max(labels) > 9 or min(labels) < 0:
        raise DataError(f"{path} holds no rows with labels 0-9; it is not CIFAR-10")
    return rows.reshape(-1, 3, 32, 32), labels


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays and plain containers; anything else in the file is refused, not run."""

    ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise DataError(
                f"the file asks for {module}.{name}, which CIFAR-10's batches do not need and "
                "which could run anything; it was not read. Take the binary version"
            )
        # The published files were written by NumPy 1, whose modules have other names today.
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
