"""Small files of the forms that the data sets' makers publish."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from PIL import Image


def cifar10(root: Path, *, rows: int = 12, binary: bool = True) -> Path:
    """The six batches of CIFAR-10."""
    folder = root / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = random.integers(0, 10, rows, dtype=np.uint8)
        noise = random.integers(0, 60, (rows, 3072), dtype=np.uint8)
        data = (noise + labels[:, None] * 19).astype(np.uint8)
        if binary:
            content = np.concatenate([labels[:, None], data], axis=1).tobytes()
            (folder / f"{name}.bin").write_bytes(content)
        else:
            batch = {b"data": data, b"labels": labels.tolist(), b"batch_label": name.encode()}
            # Protocol 2, as in the published files, with the module names of NumPy 1.
            text = pickle.dumps(batch, protocol=2).replace(b"numpy._core", b"numpy.core")
            (folder / name).write_bytes(text)
    return root


def image_folder(
    root: Path, *, per_class: int = 4, classes: tuple[str, ...] = ("cat", "dog")
) -> Path:
    """`train` and `val`, each with a folder per class."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                pixels = random.integers(0, 120, (20 + number, 28, 3), dtype=np.uint8) + 60 * label
                end = "jpg" if number % 2 else "png"
                Image.fromarray(pixels).save(folder / f"{number}.{end}")
    return root
