"""`pip install .` in an environment of its own: what it brings, and that it is enough."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.found import ROOT, blocks, sides
from tests.docs.surroundings import AROUND, CHANGE

CLOSURE = """
import json, re
from importlib import metadata
needed, pending = set(), ["egeria"]
while pending:
    name = re.sub("[-_.]+", "-", pending.pop()).lower()
    if name in needed:
        continue
    needed.add(name)
    for line in metadata.requires(name) or ():
        if "extra ==" not in line:
            try:
                found = metadata.distribution(re.match("[A-Za-z0-9._-]+", line)[0])
            except metadata.PackageNotFoundError:  # of another platform
                continue
            pending.append(found.name)
there = {re.sub("[-_.]+", "-", one.name).lower() for one in metadata.distributions()}
print(json.dumps([sorted(needed), sorted(there)]))
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_bare_environment_runs_the_first_example(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def call(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, "-m", "venv", python.parents[1])
    call(python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", ROOT)
    needed, there = json.loads(call(python, "-c", CLOSURE))
    assert {*needed} <= {*there}
    assert {*there} - {*needed} <= {"pip", "setuptools"}
    assert "torch" in call(python, "-W", "error", "-m", "egeria_cache")
    assert "usage: cache-inspect" in call(python.parent / "cache-inspect")
    key = ("README.md", CHANGE, 0)
    (block,) = [block for block in blocks() if block.key == key and block.is_code]
    script = tmp_path / "train.py"
    script.write_text(
        f"if __name__ == '__main__':\n    exec({AROUND[key].code(sides(block)[1])!r})"
    )
    call(python, script)
    assert "160" in call(python.parent / "cache-inspect", tmp_path / "runs" / "cache")


# The codec that docs/extending.md adds: its change is made to a copy of the package, and works.

TRIAL = """
import torch
from egeria_cache import ActivationStore

rows = (torch.arange(4000) % 7).float().repeat(16, 1)
with ActivationStore("cache", codec="zlib") as store:
    generation = store.open_generation({"boundary": "layer"})
    generation.put_batch(range(16), {"act": rows})
    store.flush(30)
with ActivationStore("cache", codec="zlib") as store:
    generation = store.open_generation({"boundary": "layer"})
    fields, hit = generation.get_batch(range(16))
    assert hit.all() and torch.equal(fields["act"], rows)
    print(store.stats().stored_bytes / rows.nbytes)
"""


def changed(text, change):
    """Return a file after the hunks of one change; what they say of it before must be there."""
    for hunk in re.split(r"^@@\n", change, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.cases(1)
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_codec_is_added_in_two_files(tmp_path, native):
    shutil.copytree(ROOT / "egeria_cache", tmp_path / "egeria_cache")
    document = (ROOT / "docs" / "extending.md").read_text()
    (block,) = re.findall(r"^```text\n(---.*?)^```", document, re.MULTILINE | re.DOTALL)
    _, *parts = re.split(r"^--- (\S+)\n", block, flags=re.MULTILINE)
    assert len(parts) == 4  # two files, each with its hunks
    for name, change in zip(parts[::2], parts[1::2], strict=True):
        file = tmp_path / name
        file.write_text(changed(file.read_text(), change))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "EGERIA_NATIVE": native}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.2
