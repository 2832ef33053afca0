import json
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from egeria_cache import __version__
from egeria_cache.inspect.cli import main
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
    assert "of 10 MB" in shown.out
    assert ask(capsys, filled, "ls")[1].out == shown.out


def test_ls_as_json_has_sizes_and_counts(filled, capsys):
    code, report = ask_json(capsys, filled)
    assert code == 0
    assert report["limit_bytes"] == 10_000_000
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
    assert (report["codec"], report["contents"]["num_damaged"]) == ("zstd", 0)


def test_an_unknown_generation_is_a_bad_argument_and_names_the_known(filled, capsys):
    code, shown = ask(capsys, filled, "show", "nothing")
    assert code == 2
    assert "gen-" in shown.err


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


def test_a_damaged_description_of_the_cache_exits_1(filled, capsys):
    (filled / "cache.json").write_text("{]")
    code, shown = ask(capsys, filled, "verify")
    assert code == 1
    assert "is not JSON" in shown.err


def test_diff_shows_the_fields_that_differ(filled, capsys):
    _, report = ask_json(capsys, filled)
    names = [one["name"] for one in report["generations"]]
    code, differing = ask_json(capsys, filled, "diff", *names)
    assert code == 0
    assert list(differing) == ["boundary"]
    assert set(differing["boundary"].values()) == {"layer1", "layer2"}
    assert "boundary" in ask(capsys, filled, "diff", *names)[1].out
    assert "the same" in ask(capsys, filled, "diff", names[0], names[0])[1].out


def test_prune_removes_nothing_without_yes(filled, capsys):
    code, shown = ask(capsys, filled, "prune", "--to-size", "1kB")
    assert code == 0
    assert shown.out.count("would be removed") == 2
    assert len(list(filled.glob("gen-*"))) == 2


def test_prune_by_age_takes_only_what_was_not_used_since(filled, capsys):
    old = next(filled.glob("gen-*"))
    week_ago = time.time() - 7 * 86_400
    os.utime(old / "in-use", (week_ago, week_ago))
    ask(capsys, filled, "prune", "--older-than", "3", "--yes")
    assert not old.exists()
    assert len(list(filled.glob("gen-*"))) == 1


@pytest.mark.parametrize("way", [["--unused"], ["--to-size", "1kB"]])
def test_prune_takes_all_that_no_process_holds_and_leaves_what_is_in_use(filled, capsys, way):
    with ActivationStore(filled) as store:
        used = store.open_generation({"boundary": "layer1", "mode": "train"})
        _, outcome = ask_json(capsys, filled, "prune", "--unused")
        assert [one["outcome"] for one in outcome.values()] == ["would be removed"]
        ask(capsys, filled, "prune", *way, "--yes")
        assert [path.name for path in filled.glob("gen-*")] == [used.name]
        assert used.contains([0]).all()
    assert ask(capsys, filled, "prune", "--unused", "--yes")[0] == 0
    assert not list(filled.glob("gen-*"))
    assert "0 generations" in ask(capsys, filled)[1].out


def test_fields_that_look_like_markup_are_shown_as_they_are(directory, capsys):
    with ActivationStore(directory) as store:
        names = [store.open_generation({"[b]": value}).name for value in ([True], ["[/x]:bomb:"])]
    _, shown = ask(capsys, directory, "diff", *names)
    assert "[b]" in shown.out
    assert "[true]" in shown.out
    assert '["[/x]:bomb:"]' in shown.out
    for name in names:
        assert ask(capsys, directory, "show", name)[0] == 0


def test_a_directory_that_is_no_cache_exits_2_with_a_reason(tmp_path, capsys):
    code, shown = ask(capsys, tmp_path)
    assert code == 2
    assert "not an Egeria cache" in shown.err
    assert ask(capsys, tmp_path / "missing")[0] == 2


def test_the_tool_runs_from_a_checkout_and_prints_no_colour_into_a_pipe(filled):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "cache-inspect", filled],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


WRITER = """
    import sys, torch
    from egeria_cache.store.store import ActivationStore
    torch.set_num_threads(1)
    with ActivationStore(sys.argv[1], codec="zstd") as store:
        for start in range(0, 10**6, 4):
            store.put_batch(range(start, start + 4), torch.randn(4, 300))
            store.flush(30)
            print("go", flush=True)
"""


def test_a_cache_that_another_process_is_writing_can_be_looked_at_and_is_healthy(directory, capsys):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), directory],
        stdout=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        assert run.stdout.readline() == "go\n"
        counts = []
        for _ in range(5):
            code, report = ask_json(capsys, directory)
            assert code == 0
            (one,) = report["generations"]
            assert one["in_use"]
            code, report = ask_json(capsys, directory, "show", "gen")
            assert code == 0
            code, report = ask_json(capsys, directory, "verify")
            assert (code, report["damage"]) == (0, [])
            counts.append(report["records"])
            for _ in range(8):
                run.stdout.readline()
        assert ask_json(capsys, directory, "prune", "--unused", "--yes") == (0, {})
        run.kill()
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_generation_whose_making_was_cut_short_is_empty_and_not_damaged(directory, capsys):
    ActivationStore(directory).close()
    (directory / "gen-0123456789ab").mkdir()
    code, report = ask_json(capsys, directory)
    assert code == 0
    assert report["generations"][0]["num_samples"] == 0
    assert ask(capsys, directory)[0] == 0
    assert ask(capsys, directory, "verify")[0] == 0


def test_what_an_interrupted_removal_left_behind_is_cleared(filled, capsys):
    for path in filled.glob("gen-*"):
        path.rename(filled / f".gone-{path.name}-1")
    assert ask(capsys, filled, "prune", "--unused", "--yes")[0] == 0
    assert not list(filled.glob(".gone-*"))


# What `cache-inspect` says to people: in a pipe, on a narrow terminal, and where they misspell.

LONG = "encoder.layers.11.attention.output.dense.with.a.name.that.is.longer.than.any.terminal"


@pytest.fixture
def filled_once(directory):
    with ActivationStore(directory, "10MB") as store:
        generation = store.open_generation({"boundary": LONG, "mode": "train"})
        generation.put_batch(range(4), {"act": torch.zeros(4, 100)})
        store.flush(30)
    return directory


def shown_on_a_terminal(columns, *arguments):
    """Return what a terminal of so many columns gets."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, ROOT / "tools" / "cache-inspect", *map(str, arguments)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        told = b""
        try:
            while part := os.read(ours, 65_536):
                told += part
        except OSError:  # what a terminal says when nobody writes to it any more
            pass
    os.close(ours)
    assert process.returncode == 0, told
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", told.decode()).splitlines()


def test_no_name_is_cut_in_a_pipe(filled_once, capsys):
    assert main([str(filled_once)]) == 0
    assert LONG in capsys.readouterr().out


def test_a_narrow_terminal_has_fewer_columns_and_all_of_the_figures(filled_once):
    (filled_once / "cache.lock").touch()
    for columns in (60, 200):
        lines = shown_on_a_terminal(columns, filled_once)
        assert columns < len(LONG) or all(len(line) <= columns for line in lines)
        assert ("codec" in lines[0]) is (columns == 200)
        assert "samples" in lines[0]
        assert "1 generation," in lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["DIR", "verfy"], "there is no command 'verfy'; did you mean 'verify'"),
        (["verify", "DIR"], "the directory comes first: cache-inspect DIR verify"),
        (["show", "DIR", "gen-1"], "the directory comes first: cache-inspect DIR show gen-1"),
        (["ls"], "the directory comes first: cache-inspect DIR ls"),
        (["DIR", "prune", "--older-than", "soon"], "--older-than: invalid _days value: 'soon'"),
        (["DIR", "prune", "--older-than", "-1"], "--older-than: invalid _days value: '-1'"),
        (["DIR", "prune"], ""),
        (["DIR", "frobnicate"], "frobnicate"),
        (["DIR", "show"], ""),
        (["DIR", "prune", "--to-size", "many"], "many"),
        (["plan", "nothing"], "package.module:callable"),
        (["plan", "nothing:x"], "No module named 'nothing'"),
        (["DIR", "clear"], "clear is gone: prune --unused"),
        (["fill", "models:make"], "fill is gone: call cache.fill(loader)"),
    ],
)
@pytest.mark.cases(14)
def test_what_is_wrong_with_an_argument_is_told_with_exit_code_2(filled_once, capsys, words, said):
    assert main([str(filled_once) if word == "DIR" else word for word in words]) == 2
    told = capsys.readouterr().err.replace(str(filled_once), "DIR")
    assert said in told


def test_a_directory_that_others_may_write_to_is_told(filled_once, capsys):
    filled_once.chmod(0o777)
    assert main([str(filled_once)]) == 0
    assert "others may write to this directory" in capsys.readouterr().out


def test_the_document_has_every_key_of_the_json(filled_once, tmp_path, capsys):
    document = (ROOT / "docs" / "inspect.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", document, re.MULTILINE))
    told = {name: re.findall(r"`(\w+)`", text) for name, text in rows.items()}

    def keys(*arguments):
        main([str(filled_once), *map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out)

    listed = keys("ls")
    (generation,) = listed["generations"]
    assert {*listed} == {*told["`ls`"]}
    assert {*generation} == {*told["a generation"]}
    assert {*keys("show", generation["name"])} == {*generation, *told["`show`"]}
    for command in ("verify", "pack", "unpack"):
        file = [tmp_path / "packed"] if "pack" in command else []
        name = [generation["name"]] if command == "pack" else []
        assert {*keys(command, *name, *file)} <= {*told[f"`{command}`"]}, command
    (gone,) = keys("prune", "--unused").values()
    assert {*gone} == {*told["`prune`"]}


def test_the_bare_command_explains_itself(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for command in ("plan", "verify", "show", "diff", "prune"):
        assert f" {command}" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.long
def test_all_tell_the_same_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cache-inspect {__version__}\n"
    for package in ("egeria_cache", "egeria_core"):
        done = subprocess.run(
            [sys.executable, "-m", package], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert done.stdout.startswith(f"egeria {__version__}")
