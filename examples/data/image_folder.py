"""A folder per class, with image files in it: how ImageNet is usually laid out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.files import DataError, version
from data.images import middle_box, open_image, random_box, to_tensor

__all__ = ["ImageFolder"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"})


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images, float32 (3, size, size), and the numbers of their classes.

    Classes are the folders in `root`, in the order of their names; images may lie deeper.

    Args:
        root: The folder of the classes.
        size: Side of the square that images are scaled to.
        train: Cut and mirrored at random; or the middle of each image.
        classes: The classes of the training part, so that both parts number them alike.

    Raises:
        DataError: There is no such folder, no class in it, or no image in a class.
    """

    def __init__(
        self, root: Path, *, size: int, train: bool, classes: list[str] | None = None
    ) -> None:
        if not root.is_dir():
            raise DataError(
                f"{root} is not a folder; give one that holds a folder of images for each class"
            )
        self.root, self.size, self.train = root, size, train
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        self.classes = found if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise DataError(
                f"{root} has classes that the training part lacks: {', '.join(unknown[:5])}; "
                "remove them, or add them there"
            )
        self.samples: list[tuple[str, int]] = []
        """Path below the root, with forward slashes, and class."""
        for label, name in enumerate(self.classes):
            files = sorted(
                path.relative_to(root).as_posix()
                for path in (root / name).rglob("*")
                if path.suffix.lower() in SUFFIXES and path.is_file()
            )
            if not files and classes is None:
                raise DataError(
                    f"class {name!r} in {root} has no image; known suffixes are "
                    f"{', '.join(sorted(SUFFIXES))}. Remove the folder if it is no class"
                )
            self.samples += [(file, label) for file in files]
        if not self.samples:
            raise DataError(
                f"{root} holds no image; it must hold a folder for each class, and images in them"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        name, label = self.samples[index]
        image = open_image(self.root / name)
        box = random_box(image) if self.train else middle_box(image)
        from PIL import Image

        pixels = to_tensor(
            image.resize((self.size, self.size), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
        )
        if self.train and bool(torch.rand(()) < 0.5):
            pixels = pixels.flip(2)
        return pixels, label

    def sample_id(self, index: int) -> str:
        """The path below the root: the same wherever the folder lies, and in any order."""
        return self.samples[index][0]

    def sample_version(self, index: int) -> str:
        """The file's time of change and size."""
        return version(self.root / self.samples[index][0])

    def fingerprint(self) -> str:
        """What else a row depends on: the numbers of the classes, and how images are cut."""
        return repr((self.classes, self.size, self.train))
