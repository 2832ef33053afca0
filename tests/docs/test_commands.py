"""Every command in README and docs/*.md is understood by the program it names.

It parses the command line, and stops then: an option that is gone, a script that was moved or an
extra that was renamed fails here. What cannot be parsed without a program that is not here stands
in `NOT_HERE`.
"""

import argparse
import contextlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from torch.distributed.run import parse_args as parse_torchrun

from egeria_cache.inspect import main as cache_inspect
from tests.docs.found import ROOT, commands

COMMANDS = commands()
ARGS = next(line for line in COMMANDS if line.startswith("ARGS=")).partition("=")[2].strip('"')
MENTIONS = {
    "cache-inspect DIR [COMMAND]": "cache-inspect DIR ls",
    "cache-inspect pack": "cache-inspect DIR pack GEN FILE",
}
"""Short for what is given in full elsewhere."""
TORCHX = "torchx takes a job apart by itself; tests/examples/test_launchers.py runs it where it is"
NOT_HERE = {
    line: TORCHX if line.startswith("torchx") else "there is no Slurm here"
    for line in COMMANDS
    if "torchx run" in line or " sbatch " in line
}
"""Of these the part behind the launcher is parsed."""


class Parsed(BaseException):
    """The command line was understood, and nothing was done."""


@contextlib.contextmanager
def parsing(monkeypatch):
    """Expect a program to read its arguments, and stop it then."""
    read = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        read(self, args, namespace)
        raise Parsed

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed):
            yield


def words_of(line):
    """Return the parts of a pipe, each as a list of words without assignments to variables."""
    line = MENTIONS.get(line, line).replace("$ARGS", ARGS).replace("\\|", "|")
    for part in line.split(" | "):
        words = shlex.split(part)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        yield words[2:] if words[:1] == ["ssh"] else words


def understand(words, monkeypatch):
    """Have the program that is named read its arguments."""
    program, *rest = words
    if program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0
    elif program == "pip":
        extras = re.findall(r"\[(.*)\]", rest[-1])
        text = (ROOT / "pyproject.toml").read_text()
        assert rest[0] == "install"
        assert re.fullmatch(r"\.(\[\w+\])?", rest[-1])
        assert all(re.search(rf"^{extra} = \[", text, re.MULTILINE) for extra in extras)
    elif program == "torchrun":
        options = parse_torchrun(rest)
        understand(["python", options.training_script, *options.training_script_args], monkeypatch)
    elif rest[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).exists() for path in rest[2:])
    elif program == "python":
        with parsing(monkeypatch):
            start(rest, monkeypatch)
    else:
        with parsing(monkeypatch):
            assert program == "cache-inspect"
            cache_inspect(rest)


def start(words, monkeypatch):
    """Run a script or a module as `python` does."""
    is_module = words[0] == "-m"
    monkeypatch.setattr(sys, "argv", words[1:] if is_module else words)
    if is_module:
        name = words[1]
        if importlib.util.find_spec(name).submodule_search_locations is not None:
            name += ".__main__"
        runpy.run_module(name, run_name="__main__", alter_sys=False)
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_what_is_listed_here_is_in_the_documents():
    assert {*MENTIONS, *NOT_HERE} <= {*COMMANDS}
    assert len(COMMANDS) > 40


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line, monkeypatch):
    if "benchmarks" in line or "examples" in line:
        pytest.importorskip("sklearn")
    for words in words_of(line):
        if line in NOT_HERE:
            script = next(i for i, word in enumerate(words) if word.startswith("examples/"))
            assert (ROOT / words[script]).exists()
            rest = [word for word in words[script + 1 :] if word != "--"]
            words = ["python", "examples/train.py", *rest]
        if words:
            understand(words, monkeypatch)


# ---- docs/inspect.md -----------------------------------------------------------------------------

INSPECT = (ROOT / "docs" / "inspect.md").read_text()
ROWS = re.findall(r"^\| `([a-z]+[^`]*)`", INSPECT.partition("## What `--json`")[0], re.MULTILINE)


def test_each_command_of_the_inspector_has_its_row(capsys):
    cache_inspect(["--help"])
    listed = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert {row.split()[0] for row in ROWS} == set(listed)


def test_each_option_that_is_told_of_is_there(capsys):
    known = set()
    for words in (["DIR", name.split()[0], "--help"] for name in ROWS):
        cache_inspect(words)
        known |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", INSPECT))
    assert len(told) >= 7
    assert told <= known, told - known
