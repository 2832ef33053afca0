"""Compiling the kernel while Egeria is installed: it is made, or left out, and nothing fails."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The hook at work on a copy of the source, without hatchling, which is not needed after."""
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", ModuleType(f"hatchling{name}"))
    plugin = ModuleType("interface")
    plugin.BuildHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", plugin)
    spec = importlib.util.spec_from_file_location("build_kernel", ROOT / "build_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / module.SOURCE).parent.mkdir(parents=True)
    shutil.copy(ROOT / module.SOURCE, tmp_path / module.SOURCE)
    hook = module.KernelHook()
    hook.root, hook.library, hook.warnings = str(tmp_path), tmp_path / module.LIBRARY, []
    hook.app = SimpleNamespace(display_warning=hook.warnings.append)
    return hook


def build(hook):
    data = {"artifacts": [], "pure_python": True}
    hook.initialize("standard", data)
    return data


def test_what_is_compiled_goes_into_the_wheel_and_the_next_time_replaces_it(hook):
    if shutil.which("cc") is None:
        pytest.skip("no compiler here")
    hook_data = build(hook)
    first = hook.library.stat().st_ino
    assert build(hook) == hook_data
    assert hook.library.stat().st_ino != first  # who has mapped the first one keeps it
    assert not hook.warnings
    assert hook_data["artifacts"] == ["egeria_cache/store/_kernel.so"]
    assert hook_data["tag"].startswith("py3-none-")
    assert ctypes.CDLL(str(hook.library)).egeria_read


@pytest.mark.parametrize("compiler", ["no such compiler", "false", "'cc", "not-utf-8"])
def test_without_a_compiler_there_is_a_warning_and_no_library_of_another_time(
    hook, tmp_path, monkeypatch, compiler
):
    if compiler == "not-utf-8":
        compiler = str(tmp_path / "cc")
        Path(compiler).write_text("#!/bin/sh\nprintf 'caf\\351: fatal' >&2; exit 1\n")
        Path(compiler).chmod(0o755)
    monkeypatch.setenv("CC", compiler)
    hook.library.write_bytes(b"of another time")
    assert build(hook) == {"artifacts": [], "pure_python": True}
    assert not hook.library.exists()
    assert len(hook.warnings) == 1


def test_in_a_tree_that_cannot_be_written_to_it_is_left_out(hook, monkeypatch):
    def refuse(path, *arguments, **options):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert build(hook) == {"artifacts": [], "pure_python": True}
    assert len(hook.warnings) == 1
