"""The examples' data sets read the published files, and say what is wrong with other ones."""

import os
import pickle

import pytest
import torch
from data import Cifar10, DataError, ImageFolder
from PIL import Image

from tests.helpers import published


def test_cifars_two_versions_hold_the_same_images_under_the_same_names(tmp_path):
    published.cifar10(tmp_path / "bin")
    published.cifar10(tmp_path / "py", binary=False)
    for train, rows in ((True, 60), (False, 12)):
        binary, python = (Cifar10(tmp_path / kind, train=train) for kind in ("bin", "py"))
        assert len(binary) == rows
        assert torch.equal(binary.images, python.images)
        assert binary.targets == python.targets
        ids = [binary.sample_id(i) for i in range(rows)]
        assert ids == [python.sample_id(i) for i in range(rows)]
        assert len(set(ids)) == rows
    image, target = binary[3]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert 0 <= target <= 9


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    published.cifar10(tmp_path, binary=False)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(DataError, match="mkdir"):
        Cifar10(tmp_path, train=True)
    assert not (tmp_path / "ran").exists()


def test_images_keep_their_names_when_files_are_added(tmp_path):
    published.image_folder(tmp_path)
    before = ImageFolder(tmp_path / "train", size=16, train=False)
    images = {before.sample_id(i): before[i][0] for i in range(len(before))}
    Image.new("RGB", (9, 9)).save(tmp_path / "train" / "cat" / "00.png")
    after = ImageFolder(tmp_path / "train", size=16, train=False)
    names = [after.sample_id(i) for i in range(len(after))]
    assert len(names) == len(images) + 1
    for index, name in enumerate(names):
        if name in images:
            assert torch.equal(after[index][0], images[name])
    assert [after[i][1] for i in range(len(after))] == [0] * 5 + [1] * 4


def test_an_edited_image_has_another_version(tmp_path):
    published.image_folder(tmp_path)
    data = ImageFolder(tmp_path / "train", size=16, train=True)
    before = [data.sample_version(i) for i in range(len(data))]
    Image.new("RGB", (30, 30)).save(tmp_path / "train" / data.sample_id(2))
    after = [data.sample_version(i) for i in range(len(data))]
    assert [i for i in range(len(data)) if before[i] != after[i]] == [2]
