"""Compiles the store's kernel while Egeria is installed; without a compiler, it is left out."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "egeria_cache/store/kernel.c"
LIBRARY = "egeria_cache/store/_kernel.so"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread")


class KernelHook(BuildHookInterface):  # type: ignore[misc]
    """Found by hatchling through pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to a wheel, also to an editable one, where it lies beside its source."""
        library = Path(self.root, LIBRARY)
        fresh = library.with_suffix(".new")
        try:
            compiler = shlex.split(os.environ.get("CC") or "cc")
            command = [*compiler, *FLAGS, "-o", str(fresh), str(Path(self.root, SOURCE))]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            fresh.replace(library)  # a process that runs keeps the one it has mapped
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            if os.environ.get("EGERIA_KERNEL") == "required":  # a release without it would be slow
                raise
            said = getattr(error, "stderr", "")
            self.app.display_warning(f"no kernel, reading in Python: {error} {said}")
            with contextlib.suppress(OSError):  # a read-only tree
                library.unlink(missing_ok=True)
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        # A plain library: any Python, this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
