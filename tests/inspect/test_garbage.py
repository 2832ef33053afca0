"""Whatever a cache directory holds: an answer, valid JSON, an exit code, and no escape sequence."""

import json
import os
import random
import shutil

import pytest
import torch

from egeria_cache.inspect import main
from egeria_cache.store import ActivationStore


def commands(directory):
    names = [os.fsdecode(name) for name in os.listdir(os.fsencode(directory)) if b"gen-" in name]
    yield from (["ls"], ["verify"], ["prune", "--damaged"])
    yield ["prune", "--unused", "--to-size", "1kB"]
    for name in names:
        yield from (["show", name], ["diff", name, names[0]])


DEEP = '{"a":' * 5000 + "1" + "}" * 5000
NESTED = '{"format": 2, "created": 1, "fields": ' + '{"a":' * 400 + "1" + "}" * 401


def manifest(**content):
    return json.dumps({"format": 2, "created": 1.0, "fields": {"boundary": "x"}, **content})


TEXTS = {
    "no JSON": "{]",
    "nothing": "",
    "deep": DEEP,
    "nested": NESTED,
    "a long number": manifest(created=1).replace("1,", "1" + "0" * 400 + ",", 1),
    "a time of 10^400": manifest().replace("1.0", "1" + "0" * 400),
    "a time without end": manifest().replace("1.0", "1e999"),
    "a word that is no number": manifest().replace("1.0", "NaN"),
    "a number without end inside": manifest().replace('"x"', "[1e999, -1e999]"),
    "escapes": manifest(fields={"boundary": "\x1b[31m\x07:bomb:[bold]", "\x1b]0;x\x07": "\u202e"}),
    "half a character": '{"format": 2, "created": 1.0, "fields": {"boundary": "\\ud800"}}',
    "a list": "[1, 2]",
    "a newer format": manifest(format=99),
    "a strange format": manifest(format=-(10**30)),
    "no fields": manifest(fields=[1]),
}


@pytest.fixture
def two_filled(tmp_path):
    with ActivationStore(tmp_path / "cache", limit="10MB", codec="zstd") as store:
        for boundary in ("layer1", "layer2"):
            generation = store.open_generation({"boundary": boundary})
            generation.put_batch(range(5), {"x": torch.zeros(5, 300), "t": ["\x1b[2J"] * 5})
            store.flush()
    return tmp_path / "cache"


def refuse(word):
    raise AssertionError(f"{word} is no JSON")


def check(capsys, directory):
    """Run every command in both forms."""
    for command in commands(directory):
        for form in ([], ["--json"]):
            code = main([*form, str(directory), *command])
            shown = capsys.readouterr()
            assert code in (0, 1, 2)
            assert not any(ord(one) < 32 and one not in "\n\t" for one in shown.out + shown.err)
            assert "Traceback" not in shown.err
            if form and code != 2 and shown.out:
                json.loads(shown.out, parse_constant=refuse)
            assert shown.out or shown.err


@pytest.mark.parametrize("name", ["cache.json", "manifest.json"])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_description_that_is_garbage_is_told_and_not_obeyed(two_filled, capsys, name, kind):
    path = next(two_filled.rglob(name))
    path.write_text(TEXTS[kind])
    check(capsys, two_filled)


@pytest.mark.parametrize("kind", ["directory", "link", "loop", "fifo", "huge", "bytes"])
@pytest.mark.parametrize("name", ["cache.json", "manifest.json", "data.mdb", "lock.mdb", "in-use"])
def test_a_file_that_is_something_else_is_told(two_filled, capsys, name, kind):
    path = next(two_filled.rglob(name))
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**34)
    else:
        path.write_bytes(bytes(range(256)) * 20)
    if (name, kind) != ("data.mdb", "huge"):
        check(capsys, two_filled)


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_mutations_of_any_file_are_told(two_filled, capsys, count):
    rng, copy = random.Random(count), two_filled.with_name("copy")
    for _ in range(count):
        shutil.copytree(two_filled, copy)
        path = rng.choice([path for path in copy.rglob("*") if path.is_file()])
        content = bytearray(path.read_bytes() or b"\0")
        for _ in range(rng.choice([1, 1, 10])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(
            bytes(content[: rng.choice([len(content), rng.randrange(len(content) + 1)])])
        )
        check(capsys, copy)
        shutil.rmtree(copy)
