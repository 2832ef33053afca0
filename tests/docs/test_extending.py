"""The codec that docs/extending.md adds: its change is made to a copy of the package, and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
        [sys.executable, "-P", "-c", TRIAL], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.2
