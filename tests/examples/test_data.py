"""The examples' data sets read the published files, and say what is wrong with other ones."""

import os
import pickle

import pytest
import torch
from data import Cifar10, DataError, ImageFolder, Squad, TextPairs, Tokenizer, VocSegmentation
from data.text_pairs import pair_of_files
from data.tokenizer import BEGIN, END, PAD
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from egeria_cache import EgeriaLoader
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


def test_cifars_fingerprint_follows_the_content(tmp_path):
    published.cifar10(tmp_path)
    before = Cifar10(tmp_path, train=True).fingerprint()
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert Cifar10(tmp_path, train=True).fingerprint() != before


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


def test_training_images_repeat_under_the_loaders_seed(tmp_path):
    published.image_folder(tmp_path)
    data = ImageFolder(tmp_path / "train", size=16, train=True)
    first, second = (next(iter(EgeriaLoader(data, 8, seed=3))) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], next(iter(EgeriaLoader(data, 8, seed=4)))[0])


def test_vocs_image_and_mask_are_cut_alike(tmp_path):
    published.voc(tmp_path)
    torch.manual_seed(0)
    data = VocSegmentation(tmp_path, split="train", size=32, augment=True)
    assert len(data) == 6
    for index in range(6):
        image, classes = data[index]
        assert image.shape == (3, 32, 32)
        assert classes.shape == (32, 32)
        assert classes.dtype == torch.int64
        # Objects are brighter than the background in these files.
        if bool((classes > 0).any()) and bool((classes == 0).any()):
            assert image[:, classes > 0].mean() > image[:, classes == 0].mean() + 1


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60))
def test_offsets_lead_back_to_the_text(text):
    tokenizer = Tokenizer.build(["the old fox", text])
    pieces = tokenizer.split(text)
    assert [p.token for p in pieces] == tokenizer.encode(text)
    last = 0
    for piece in pieces:
        assert last <= piece.start < piece.stop <= len(text)
        assert not text[last : piece.start].strip()  # nothing but white space is left out
        last = piece.stop
    assert not text[last:].strip()


def test_words_outside_the_vocabulary_are_spelt(tmp_path):
    tokenizer = Tokenizer.build(["low lower lowest", "low low"], size=19)
    assert "low" in tokenizer.pieces
    assert tokenizer.decode(tokenizer.encode("low slower")) == "low slower"
    assert tokenizer.decode([5, END, 6]) == tokenizer.decode([5])
    path = tmp_path / "vocabulary.json"
    kept = Tokenizer.kept(path, ["low lower lowest", "low low"], size=19)
    assert kept.pieces == tokenizer.pieces
    assert Tokenizer.kept(path, ["other words"]).pieces == tokenizer.pieces  # never made anew
    path.write_text("[1, 2")
    with pytest.raises(DataError, match=r"vocabulary\.json is no vocabulary"):
        Tokenizer.load(path)


def text_pairs(root, length=8):
    files = pair_of_files(root, "train", "en-de")
    tokenizer = Tokenizer.build(
        line for file in files for line in file.read_text(errors="ignore").split("\n")
    )
    return TextPairs(*files, tokenizer=tokenizer, length=length)


def test_sentences_are_padded_and_shifted(tmp_path):
    data = text_pairs(published.text_pairs(tmp_path))
    words = (tmp_path / "train.de").read_text().split("\n")
    for index in range(len(data)):
        source, read, said = data[index]
        assert source.shape == read.shape == said.shape == (8,)
        assert read[0] == BEGIN
        assert END in source
        assert END in said
        assert torch.equal(read[1:][read[1:] != PAD], said[(said != PAD) & (said != END)])
        clean = data.tokenizer.decode(said.tolist())
        assert words[index].lower().replace(".", " .").startswith(clean)


def squad(path, **sizes):
    sizes = {"length": 32, "stride": 8, "question_length": 8} | sizes
    return Squad(path, tokenizer=Tokenizer.build(published.WORDS), **sizes)


def test_every_answer_is_in_a_window_and_found_again(tmp_path):
    published.squad(tmp_path)
    data = squad(tmp_path / "train-v1.1.json")
    assert len({data.sample_id(i) for i in range(len(data))}) == len(data) > 12
    seen = set()
    for index, window in enumerate(data.windows):
        row = data[index]
        assert row["tokens"].shape == (32,)
        assert torch.equal(row["mask"], row["tokens"] != PAD)
        assert not row["segments"][: window.offset].any()
        start, stop = int(row["start"]), int(row["stop"])
        if stop:
            true = data.questions[window.question].answers[0][0]
            assert data.answer(index, start, stop) == true
            assert row["segments"][start : stop + 1].all()
            seen.add(window.question)
        else:
            assert data.answer(index, start, stop) == ""
    assert seen == set(range(12))


def test_windows_cover_the_whole_context(tmp_path):
    published.squad(tmp_path)
    for stride in (1, 5, 20):
        data = squad(tmp_path / "train-v1.1.json", stride=stride)
        for question in range(len(data.questions)):
            windows = [w for w in data.windows if w.question == question]
            covered = {piece.start for w in windows for piece in w.pieces}
            assert covered == {
                p.start for p in data.tokenizer.split(data.questions[question].context)
            }
