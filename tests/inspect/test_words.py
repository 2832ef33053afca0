"""What `cache-inspect` says to people: in a pipe, on a narrow terminal, and where they misspell."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from egeria_cache import ActivationStore, __version__
from egeria_cache.inspect import main

ROOT = Path(__file__).resolve().parents[2]
LONG = "encoder.layers.11.attention.output.dense.with.a.name.that.is.longer.than.any.terminal"


@pytest.fixture
def filled(directory):
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


def test_no_name_is_cut_in_a_pipe(filled, capsys):
    assert main([str(filled)]) == 0
    assert LONG in capsys.readouterr().out


def test_a_narrow_terminal_has_fewer_columns_and_all_of_the_figures(filled):
    (filled / "cache.lock").touch()
    for columns in (60, 200):
        lines = shown_on_a_terminal(columns, filled)
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
        (["DIR", "show", "gen-nothing"], "gen-nothing"),
        (["plan", "nothing"], "--data"),
        (["plan", "nothing:x", "--data", "nothing:y"], "No module named 'nothing'"),
        (["DIR", "clear"], "clear is gone: prune --unused"),
        (["fill", "models:make"], "fill is gone: call cache.fill(loader)"),
    ],
)
@pytest.mark.cases(11)
def test_what_is_wrong_with_an_argument_is_told_with_exit_code_2(filled, capsys, words, said):
    assert main([str(filled) if word == "DIR" else word for word in words]) == 2
    told = capsys.readouterr().err.replace(str(filled), "DIR")
    assert said in told


def test_a_directory_that_others_may_write_to_is_told(filled, capsys):
    filled.chmod(0o777)
    assert main([str(filled)]) == 0
    assert "others may write to this directory" in capsys.readouterr().out


def test_the_document_has_every_key_of_the_json(filled, tmp_path, capsys):
    document = (ROOT / "docs" / "inspect.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", document, re.MULTILINE))
    told = {name: re.findall(r"`(\w+)`", text) for name, text in rows.items()}

    def keys(*arguments):
        main([str(filled), *map(str, arguments), "--json"])
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
