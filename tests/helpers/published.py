"""Small files of the forms that the data sets' makers publish."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ["the", "red", "fox", "saw", "a", "blue", "bird", "on", "old", "stone", "walls", "near"]


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


def voc(root: Path, *, num_train: int = 6, num_val: int = 2) -> Path:
    """VOCdevkit/VOC2012 with its palette masks."""
    place = root / "VOCdevkit" / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (place / folder).mkdir(parents=True)
    random = np.random.default_rng(0)
    numbers = iter(range(num_train + num_val))
    for split, count in (("train", num_train), ("val", num_val)):
        names = [f"2007_{next(numbers):06d}" for _ in range(count)]
        (place / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for name in names:
            mask = np.zeros((40, 56), np.uint8)
            mask[8:30, 10:40] = random.integers(1, 21)
            mask[8, 10:40] = 255
            pixels = random.integers(0, 50, (40, 56, 3), dtype=np.uint8) + 150 * (
                mask[..., None] > 0
            )
            Image.fromarray(pixels.astype(np.uint8)).save(place / "JPEGImages" / f"{name}.jpg")
            picture = Image.fromarray(mask, mode="L").convert("P")
            picture.putdata(mask.flatten().tolist())
            picture.save(place / "SegmentationClass" / f"{name}.png")
    return root


def text_pairs(root: Path, *, lines: int = 40) -> Path:
    """train.en, train.de, valid.en, valid.de: the target is the source in reverse, in capitals."""
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for split, count in (("train", lines), ("valid", 8)):
        pairs = [random.choice(WORDS, random.integers(3, 8)).tolist() for _ in range(count)]
        (root / f"{split}.en").write_text("".join(" ".join(words) + ".\n" for words in pairs))
        (root / f"{split}.de").write_text(
            "".join(" ".join(words[::-1]).upper() + ".\n" for words in pairs)
        )
    return root


def squad(root: Path, *, paragraphs: int = 6, unanswerable: bool = False) -> Path:
    """train-v1.1.json and dev-v1.1.json (or v2.0)."""
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for split, count in (("train", paragraphs), ("dev", 2)):
        found = []
        for number in range(count):
            words = random.choice(WORDS, 40).tolist()
            context = " ".join(words)
            questions = []
            for place in (3, 30):
                answer = " ".join(words[place : place + 2])
                start = len(" ".join(words[:place])) + 1
                questions.append(
                    {
                        "id": f"{split}-{number}-{place}",
                        "question": f"What comes after {words[place - 1]}?",
                        "answers": [{"text": answer, "answer_start": start}],
                    }
                )
            if unanswerable:
                questions.append(
                    {"id": f"{split}-{number}-none", "question": "Why?", "answers": [],
                     "is_impossible": True}
                )  # fmt: skip
            found.append({"context": context, "qas": questions})
        version = "2.0" if unanswerable else "1.1"
        content = {"version": version, "data": [{"title": "x", "paragraphs": found}]}
        (root / f"{split}-v{version}.json").write_text(json.dumps(content))
    return root
