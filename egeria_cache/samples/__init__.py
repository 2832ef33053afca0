"""Raw samples: each loaded under a seed of its own, and told from those of another data set.

Owns no thread: what is here runs in DataLoader's workers and in the training thread. It never reads
the store; a sample is what the data set gives.

`loading.py` loads a `Task`, `generators.py` seeds and restores the global generators around each
sample, `source.py` is one loader's data set with its names and its self-test, `fingerprint.py` says
which data set it is.
"""

from egeria_cache.samples.loading import (
    CollateLoaded,
    Loaded,
    SeededDataset,
    SeededWorkerInit,
    Task,
)
from egeria_cache.samples.source import BatchContext, LoaderSource

__all__ = [
    "BatchContext",
    "CollateLoaded",
    "Loaded",
    "LoaderSource",
    "SeededDataset",
    "SeededWorkerInit",
    "Task",
]
