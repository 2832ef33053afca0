"""Images from files: decoded by Pillow, cut at random or in the middle, as float tensors.

Random numbers come from torch's default generator, which `EgeriaLoader` seeds for each sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.files import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Box", "crop_and_flip", "middle_box", "open_image", "random_box", "to_tensor"]

Box = tuple[float, float, float, float]
"""Left, upper, right, lower, in pixels of the original."""
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def open_image(path: Path, mode: str | None = "RGB") -> Image:
    """Decode an image file.

    Args:
        path: Any format that Pillow reads.
        mode: Convert to this mode; None keeps the file's own.

    Raises:
        DataError: Pillow is missing, or the file is not an image, or cut short.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("reading image files needs Pillow: pip install pillow") from None
    try:
        with Image.open(path) as image:
            return image.convert(mode) if mode is not None else image.copy()
    except FileNotFoundError:
        raise DataError(
            f"{path} is listed, but missing; unpack the archive again, or take it off the list"
        ) from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{path} cannot be decoded ({error}); fetch it again, or remove it"
        ) from None


def random_box(image: Image, least: float = 0.25) -> Box:
    """Return a box of `least` to all of the area, with sides of 3:4 to 4:3, anywhere inside."""
    width, height = image.size
    area, shape, x, y = torch.rand(4).tolist()
    area = width * height * (least + (1 - least) * area)
    ratio = (3 / 4) ** (1 - 2 * shape)
    across, down = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    left, upper = x * (width - across), y * (height - down)
    return left, upper, left + across, upper + down


def middle_box(image: Image, part: float = 0.875) -> Box:
    """Return the square in the middle whose side is `part` of the shorter side."""
    width, height = image.size
    side = min(width, height) * part
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def to_tensor(image: Image) -> Tensor:
    """Return an RGB image as float32 (3, H, W), normalised by ImageNet's mean and deviation."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels / 255 - MEAN) / STD


def crop_and_flip(image: Tensor, padding: int = 4) -> Tensor:
    """Shift (3, H, W) by up to `padding` pixels each way, and mirror every second one."""
    height, width = image.shape[1:]
    padded = torch.nn.functional.pad(image, [padding] * 4)
    top, left, mirror = torch.randint(2 * padding + 1, (3,)).tolist()
    cut = padded[:, top : top + height, left : left + width]
    return cut.flip(2) if mirror % 2 else cut
