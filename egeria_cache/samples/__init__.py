"""Raw samples: each loaded under a seed of its own, and told from those of another data set.

What is here runs in DataLoader's workers and in the training thread; beside a loader's workers it
owns one more process (`side_worker.py`), for samples that are asked for out of turn. It never reads
the store; a sample is what the data set gives.

`loading.py` loads a `Task`, `draws.py` says which random draw of each sample an epoch uses,
`generators.py` seeds and restores the global generators around each sample, `source.py` is one
loader's data set with its names and its self-test, `study.py` finds out what its collate function
does (`collation.py`), `fingerprint.py` says which data set it is and whether it still is, by the
content of all that decides a sample (`pystate`), and by what loading moves (`counters.py`).
`content.py` compares samples.
"""

from egeria_cache.samples.collation import find_places, own_lengths
from egeria_cache.samples.content import row_prints, same_values
from egeria_cache.samples.draws import DEFAULT_REUSE, Clock, Draws
from egeria_cache.samples.loading import Loaded, Task, task_loader
from egeria_cache.samples.source import RESTLESS, BatchContext, LoaderSource

__all__ = [
    "DEFAULT_REUSE",
    "RESTLESS",
    "BatchContext",
    "Clock",
    "Draws",
    "Loaded",
    "LoaderSource",
    "Task",
    "find_places",
    "own_lengths",
    "row_prints",
    "same_values",
    "task_loader",
]
