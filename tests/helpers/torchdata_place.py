"""A pytest plugin: whoever imports torchdata's StatefulDataLoader gets an EgeriaLoader.

Its `snapshot_every_n_steps` is accepted and without effect: every state is exact.
"""

from __future__ import annotations

from typing import Any

from torchdata import stateful_dataloader

from egeria_cache import EgeriaLoader


class StatefulDataLoader(EgeriaLoader):
    def __init__(self, *args: Any, snapshot_every_n_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **{"seed": 0, **kwargs})


stateful_dataloader.StatefulDataLoader = StatefulDataLoader
