"""A generation as one file: whole, verified, or refused."""

import io
import json
import os
import random
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria_cache.inspect import main
from egeria_cache.store import ActivationStore, DamagedError, pack, unpack
from egeria_cache.store import report as parcel_module
from tests.helpers.stored import damage_a_record

FIELDS = {"boundary": "layer1", "use": "parcel"}
IDS = [*range(40), "a name", (1, "b")]


def filled(directory, codec="auto"):
    torch.manual_seed(0)
    rows = torch.relu(torch.randn(len(IDS), 64))
    with ActivationStore(directory, codec=codec) as store:
        generation = store.open_generation(FIELDS)
        generation.put_batch(IDS, {"a:layer1": rows, "k:label": torch.arange(len(IDS))})
        generation.put_batch([3], {"a:layer1": rows[:1], "k:label": torch.arange(1)}, variant=2)
        store.flush()
        return generation.name, rows


def packed(directory, name):
    out = io.BytesIO()
    done = pack(directory / name, out)
    assert done["bytes"] == len(out.getvalue())
    return out.getvalue(), done


@pytest.mark.parametrize("codec", ["raw", "bitmap+split"])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_what_is_unpacked_is_what_was_packed(tmp_path, codec, block_bytes, monkeypatch):
    monkeypatch.setattr(parcel_module, "BLOCK_BYTES", block_bytes)
    name, rows = filled(tmp_path / "one", codec)
    stream, done = packed(tmp_path / "one", name)
    assert done["packed"] == len(IDS) + 1
    with ActivationStore(tmp_path / "other") as store:
        assert unpack(io.BytesIO(stream), store)["stored"] == len(IDS) + 1
        again = unpack(io.BytesIO(stream), store)
        assert (again["stored"], again["known"]) == (0, len(IDS) + 1)
        generation = store.open_generation(FIELDS)
        assert generation.name == name
        found, hit = generation.get_batch(IDS)
        assert hit.all()
        assert torch.equal(found["a:layer1"], rows)
        assert generation.contains([3], variant=2).all()
        with ActivationStore(tmp_path / "one") as first:
            before = first.open_generation(FIELDS)
            assert generation.totals.raw_bytes == pytest.approx(before.totals.raw_bytes, rel=0.01)
            assert generation.totals.stored_bytes == before.totals.stored_bytes


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    directory = tmp_path_factory.mktemp("packed")
    return packed(directory, filled(directory)[0])[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stream_that_was_changed_or_cut_short_is_refused(stream, tmp_path_factory, data):
    at = data.draw(st.integers(0, len(stream) - 1) | st.integers(len(stream) - 16, len(stream) - 1))
    if data.draw(st.booleans()):
        broken = stream[:at]
    else:
        flipped = stream[at] ^ (1 << data.draw(st.integers(0, 7)))
        broken = stream[:at] + bytes([flipped]) + stream[at + 1 :]
    directory = tmp_path_factory.mktemp("unpacked")
    with ActivationStore(directory) as store:
        with pytest.raises(DamagedError):
            unpack(io.BytesIO(broken), store)
        found, hit = store.open_generation(FIELDS).get_batch(IDS)
        torch.manual_seed(0)
        rows = torch.relu(torch.randn(len(IDS), 64))
        if hit.any():
            assert torch.equal(found["a:layer1"][hit], rows[hit])


def test_the_command_line_packs_and_unpacks(tmp_path, capsys):
    name, _ = filled(tmp_path / "one")
    file = tmp_path / "parcel"
    assert main([str(tmp_path / "one"), "pack", name[:8], str(file)]) == 0
    assert "43 packed" in capsys.readouterr().out
    assert file.stat().st_mode & 0o777 == 0o600
    assert main([str(tmp_path / "one"), "pack", name, str(file)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert main([str(tmp_path / "other"), "unpack", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"] == 43
    assert main([str(tmp_path / "other"), "verify"]) == 0
    file.write_bytes(file.read_bytes()[:-40])
    assert main([str(tmp_path / "third"), "unpack", str(file)]) == 1
    assert "cut short" in capsys.readouterr().err
    assert main([str(tmp_path / "third"), "unpack", str(tmp_path / "nothing")]) == 2


def test_a_limit_is_kept(tmp_path, capsys):
    name, _ = filled(tmp_path / "one")
    file = tmp_path / "parcel"
    assert main([str(tmp_path / "one"), "pack", name, str(file)]) == 0
    other = [str(tmp_path / "other"), "unpack", str(file), "--limit", "32KB"]
    assert main(other) == 1
    assert "no room" in capsys.readouterr().out


def test_a_damaged_record_is_left_out(tmp_path):
    name, _ = filled(tmp_path / "one", "raw")
    damage_a_record(tmp_path / "one" / name)
    _, done = packed(tmp_path / "one", name)
    assert (done["packed"], done["damaged"]) == (len(IDS), 1)


# Whatever a cache directory holds: an answer, valid JSON, an exit code, and no escape sequence.


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
