"""A generation as one file: whole, verified, or refused."""

from __future__ import annotations

import io
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria_cache.inspect import main
from egeria_cache.store import ActivationStore, DamagedError, pack, unpack
from egeria_cache.store import parcel as parcel_module
from tests.helpers.forked import started
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
    assert done.num_bytes == len(out.getvalue())
    return out.getvalue(), done


@pytest.mark.parametrize("codec", ["raw", "bitmap+split"])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_what_is_unpacked_is_what_was_packed(tmp_path, codec, block_bytes, monkeypatch):
    monkeypatch.setattr(parcel_module, "BLOCK_BYTES", block_bytes)
    name, rows = filled(tmp_path / "one", codec)
    stream, done = packed(tmp_path / "one", name)
    assert done.num_records == len(IDS) + 1
    with ActivationStore(tmp_path / "other") as store:
        assert unpack(io.BytesIO(stream), store).num_records == len(IDS) + 1
        again = unpack(io.BytesIO(stream), store)
        assert (again.num_records, again.num_known) == (0, len(IDS) + 1)
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
    at = data.draw(st.integers(0, len(stream) - 1))
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
    assert "there already" in capsys.readouterr().err
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
    assert (done.num_records, done.num_damaged) == (len(IDS), 1)


def test_a_pipe_carries_it(tmp_path, monkeypatch):
    name, _ = filled(tmp_path / "one")
    code = "from egeria_cache.inspect import main; raise SystemExit(main())"
    with started(code, tmp_path / "one", "pack", name, "-") as sender:
        monkeypatch.setattr("sys.stdin", sender.stdout)
        assert main([str(tmp_path / "other"), "unpack", "-"]) == 0
        assert sender.result() == ""
    assert main([str(tmp_path / "other"), "verify", name]) == 0
