"""Pascal VOC's segmentation part (Everingham et al. 2010), as VOCtrainval unpacks it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.files import DataError, first_present, read_lines, version
from data.images import Box, open_image, random_box, to_tensor

__all__ = ["IGNORED", "VocSegmentation"]

IGNORED = 255
"""Class of the pixels on objects' outlines, which count for nothing."""
REMEDY = (
    "Unpack VOCtrainval_11-May-2012.tar and give the folder VOCdevkit/VOC2012, the one that holds "
    "JPEGImages, SegmentationClass and ImageSets"
)


class VocSegmentation(Dataset[tuple[Tensor, Tensor]]):
    """Images, float32 (3, size, size), and the classes of their pixels, int64 (size, size).

    Args:
        root: A folder such as VOCdevkit/VOC2012, or one that holds it.
        split: Name of a list in ImageSets/Segmentation: "train", "val", "trainval".
        size: Side of the square that images are scaled to, without keeping their shape.
        augment: Cut and mirror at random.

    Raises:
        DataError: The list or a file on it is missing; the list is empty.
    """

    num_classes = 21

    def __init__(self, root: Path, *, split: str, size: int, augment: bool) -> None:
        inside = sorted(root.glob("VOCdevkit/VOC*")) + sorted(root.glob("VOC[0-9]*"))
        listed = Path("ImageSets") / "Segmentation" / f"{split}.txt"
        found = first_present(
            [place / listed for place in (root, *reversed(inside))], f"VOC's list {split!r}", REMEDY
        )
        self.root, self.size, self.augment = found.parents[2], size, augment
        self.names = [line.split()[0] for line in read_lines(found) if line.strip()]
        if not self.names:
            raise DataError(f"{found} is empty; unpack the archive again")
        missing = [p for name in self.names for p in self._paths(name) if not p.exists()]
        if missing:
            raise DataError(
                f"{len(missing)} files that {found} lists are missing, such as {missing[0]}. "
                + REMEDY
            )

    def _paths(self, name: str) -> tuple[Path, Path]:
        return (
            self.root / "JPEGImages" / f"{name}.jpg",
            self.root / "SegmentationClass" / f"{name}.png",
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        image_path, mask_path = self._paths(self.names[index])
        image, mask = open_image(image_path), open_image(mask_path, mode=None)
        if mask.mode not in ("P", "L"):
            raise DataError(
                f"{mask_path} is in mode {mask.mode}; classes are read from the palette's numbers. "
                "Take the file from SegmentationClass as published, not one saved in colour"
            )
        if mask.size != image.size:
            raise DataError(
                f"{mask_path} has {mask.size} pixels and its image {image.size}; unpack both again"
            )
        box: Box = random_box(image) if self.augment else (0, 0, *image.size)
        mirror = self.augment and bool(torch.rand(()) < 0.5)
        side = (self.size, self.size)
        pixels = to_tensor(image.resize(side, Image.Resampling.BILINEAR, box))
        resized = mask.resize(side, Image.Resampling.NEAREST, box)
        classes = torch.from_numpy(np.array(resized)).long()
        if bool(((classes >= self.num_classes) & (classes != IGNORED)).any()):
            raise DataError(
                f"{mask_path} holds class {int(classes[classes != IGNORED].max())}; VOC has 0-20, "
                f"and {IGNORED} for outlines"
            )
        return (pixels.flip(2), classes.flip(1)) if mirror else (pixels, classes)

    def sample_id(self, index: int) -> str:
        """The image's name, such as 2007_000032."""
        return self.names[index]

    def sample_version(self, index: int) -> str:
        """Times of change and sizes of the image and of its mask."""
        return version(*self._paths(self.names[index]))

    def fingerprint(self) -> str:
        """What else a row depends on."""
        return repr((self.size, self.augment))
