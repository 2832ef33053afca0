"""Raw samples: each loaded under a seed of its own, and told from those of another data set.

What is here runs in DataLoader's workers and in the training thread; beside a loader's workers it
owns one more process (`SideWorker`), for samples that are asked for out of turn. It never reads
the store; a sample is what the data set gives.

`task.py` says what is asked and comes back, `loading.py` loads it, `draws.py` which random draw
of each sample an epoch uses, `side_effects.py` seeds and restores the global generators, and what
else loading moves, `source.py` is one loader's data set with its names and its self-test,
`collation.py` finds out what its collate function does, and compares samples, `company.py` how many
of them and how long each is, `fingerprint.py` says which data set it is and whether it still is, by
the content of all that decides a sample (`pystate`).
"""

from egeria_cache.samples.collation import Found, row_prints, same_values
from egeria_cache.samples.draws import DEFAULT_REUSE, Clock, Draws, sample_seed
from egeria_cache.samples.loading import task_loader
from egeria_cache.samples.source import RESTLESS, BatchContext, LoaderSource
from egeria_cache.samples.task import Loaded, Task

__all__ = [
    "DEFAULT_REUSE", "RESTLESS", "BatchContext", "Clock", "Draws", "Found", "Loaded",
    "LoaderSource", "Task", "row_prints", "same_values", "sample_seed", "task_loader",
]  # fmt: skip
