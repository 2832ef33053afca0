import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from egeria_cache.inspect import main
from egeria_cache.store.disk.place import directory_bytes, remove_generations
from egeria_cache.store.store import ActivationStore
from tests.helpers.stored import damage_a_record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def filled(directory):
    with ActivationStore(directory, "10MB", codec="zstd") as store:
        for boundary, size in (("layer1", 3), ("layer2", 5)):
            generation = store.open_generation({"boundary": boundary, "mode": "train"})
            batch = {"act": torch.zeros(size, 1000), "label": ["a"] * size}
            generation.put_batch(range(size), batch)
        store.flush(30)
    return directory


def ask(capsys, *argv):
    code = main([str(one) for one in argv])
    return code, capsys.readouterr()


def ask_json(capsys, *argv):
    code, captured = ask(capsys, *argv, "--json")
    return code, json.loads(captured.out)


def damage_records(directory):
    for path in directory.glob("gen-*"):
        damage_a_record(path)


def test_ls_is_the_default_and_shows_every_generation(filled, capsys):
    code, shown = ask(capsys, filled)
    assert code == 0
    assert "layer1" in shown.out
    assert "layer2" in shown.out
    assert "2 generations" in shown.out
    assert ask(capsys, filled, "ls")[1].out == shown.out


def test_ls_as_json_has_sizes_and_counts(filled, capsys):
    code, report = ask_json(capsys, filled)
    assert code == 0
    assert 0 < report["bytes_on_disk"] < 10_000_000
    by_boundary = {one["boundary"]: one for one in report["generations"]}
    assert by_boundary["layer2"]["num_samples"] == 5
    assert by_boundary["layer2"]["raw_bytes"] == 5 * 4000
    assert by_boundary["layer2"]["ratio"] > 10
    assert not by_boundary["layer1"]["in_use"]


def test_a_cache_that_is_open_shows_as_in_use(filled, capsys):
    with ActivationStore(filled) as store:
        store.open_generation({"boundary": "layer1", "mode": "train"})
        _, report = ask_json(capsys, filled)
    in_use = {one["boundary"]: one["in_use"] for one in report["generations"]}
    assert in_use == {"layer1": True, "layer2": False}


def test_show_tells_contents_and_what_it_was_made_from(filled, capsys):
    _, report = ask_json(capsys, filled)
    name = report["generations"][0]["name"]
    code, shown = ask(capsys, filled, "show", name.removeprefix("gen-")[:6])
    assert code == 0
    assert "float32 [1000]" in shown.out
    assert "scalar, text or bytes" in shown.out
    assert '"train"' in shown.out
    code, report = ask_json(capsys, filled, "show", name)
    assert report["contents"]["variants"] == {"0": report["num_samples"]}
    assert (report["codec"], report["contents"]["damage"]) == ("zstd", [])


def test_verify_finds_a_healthy_cache_healthy_and_names_the_damaged_samples(filled, capsys):
    code, shown = ask(capsys, filled, "verify")
    assert code == 0
    assert "8 records in 2 generations: all intact" in shown.out
    damage_records(filled)
    code, report = ask_json(capsys, filled, "verify")
    assert code == 1
    assert not report["healthy"]
    assert len(report["damage"]) == 2
    code, shown = ask(capsys, filled, "verify")
    assert "2 damaged" in shown.out


def test_a_generation_that_cannot_be_opened_exits_1(filled, capsys):
    next(filled.glob("gen-*/data.mdb")).write_bytes(b"not a tree of LMDB." * 1000)
    code, report = ask_json(capsys, filled)
    assert code == 1
    assert not report["healthy"]
    assert ask(capsys, filled)[0] == 1
    assert ask(capsys, filled, "verify")[0] == 1


def test_damage_of_what_the_tree_says_is_free_is_found_by_verify_whatever_the_files_time(
    filled, capsys
):
    path = next(filled.glob("gen-*/data.mdb"))
    found = path.stat()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff\xff", found.st_size - 4096 + 12)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert ask(capsys, filled, "verify")[0] == 1


def test_diff_shows_the_fields_that_differ(filled, capsys):
    _, report = ask_json(capsys, filled)
    names = [one["name"] for one in report["generations"]]
    code, differing = ask_json(capsys, filled, "diff", *names)
    assert (code, list(differing)) == (0, ["boundary"])
    assert set(differing["boundary"].values()) == {"layer1", "layer2"}
    assert "boundary" in ask(capsys, filled, "diff", *names)[1].out
    assert "the same" in ask(capsys, filled, "diff", names[0], names[0])[1].out
    other = [ActivationStore(filled).open_generation(one).name for one in ({"a": None}, {"b": {}})]
    assert ask_json(capsys, filled, "diff", *other)[1].keys() == {"a", "b"}


def test_prune_removes_nothing_without_yes(filled, capsys):
    code, shown = ask(capsys, filled, "prune", "--to-size", "1kB")
    assert code == 0
    assert shown.out.count("would be removed") == 2
    assert len(list(filled.glob("gen-*"))) == 2


@pytest.mark.parametrize("way", ["--older-than", "--to-size"])
def test_prune_takes_what_was_not_used_for_longest(filled, capsys, way):
    old = next(filled.glob("gen-*"))
    week_ago = time.time() - 7 * 86_400
    os.utime(old / "in-use", (week_ago, week_ago))
    most = {"--older-than": "3", "--to-size": str(directory_bytes(filled) - 1)}
    ask(capsys, filled, "prune", way, most[way], "--yes")
    assert not old.exists()
    assert len(list(filled.glob("gen-*"))) == 1


@pytest.mark.parametrize("way", [["--unused"], ["--to-size", "1kB"]])
def test_prune_takes_all_that_no_process_holds_and_leaves_what_is_in_use(filled, capsys, way):
    with ActivationStore(filled) as store:
        used = store.open_generation({"boundary": "layer1", "mode": "train"})
        _, outcome = ask_json(capsys, filled, "prune", "--unused")
        assert [one["outcome"] for one in outcome.values()] == ["would be removed"]
        assert remove_generations(filled, [used.name]) == []  # which was in use by no one just now
        ask(capsys, filled, "prune", *way, "--yes")
        assert [path.name for path in filled.glob("gen-*")] == [used.name]
        assert used.contains([0]).all()
    assert ask(capsys, filled, "prune", "--unused", "--yes")[0] == 0
    assert not list(filled.glob("gen-*"))
    assert "0 generations" in ask(capsys, filled)[1].out


def test_a_directory_that_is_no_cache_exits_2_with_a_reason(tmp_path, capsys):
    code, shown = ask(capsys, tmp_path)
    assert code == 2
    assert "not an Egeria cache" in shown.err
    assert ask(capsys, tmp_path / "missing")[0] == 2


# What `cache-inspect` says to people where they misspell.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["DIR", "verfy"], "invalid choice: 'verfy'"),
        (["verify", "DIR"], "usage: cache-inspect [-h] [--json] [--version] DIR COMMAND"),
        (["ls"], "ls is not an Egeria cache"),
        (["DIR", "prune", "--older-than", "soon"], "--older-than: invalid float value: 'soon'"),
        (["DIR", "prune", "--unused", "--older-than", "-1"], "prune needs --older-than DAYS"),
        (["DIR", "prune"], ""),
        (["DIR", "frobnicate"], "frobnicate"),
        (["DIR", "show"], ""),
        (["DIR", "prune", "--to-size", "many"], "many"),
    ],
)
@pytest.mark.cases(9)
def test_what_is_wrong_with_an_argument_is_told_with_exit_code_2(filled, capsys, words, said):
    assert main([str(filled) if word == "DIR" else word for word in words]) == 2
    told = capsys.readouterr().err.replace(str(filled), "DIR")
    assert said in told


def test_the_document_has_every_key_of_the_json(filled, tmp_path, capsys):
    document = (ROOT / "docs" / "inspect.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", document, re.MULTILINE))
    told = {name: re.findall(r"`(\w+)`", text) for name, text in rows.items()}

    def keys(*arguments):
        return ask_json(capsys, filled, *arguments)[1]

    listed = keys("ls")
    generation, _ = listed["generations"]
    assert {*listed} == {*told["`ls`"]}
    assert {*generation} == {*told["a generation"]}
    assert {*keys("show", generation["name"])} == {*generation, *told["`show`"]}
    for command in ("verify", "pack", "unpack"):
        file = [tmp_path / "packed"] if "pack" in command else []
        name = [generation["name"]] if command == "pack" else []
        assert {*keys(command, *name, *file)} <= {*told[f"`{command}`"]}, command
    gone, _ = keys("prune", "--unused").values()
    assert {*gone} == {*told["`prune`"]}
