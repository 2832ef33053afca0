"""What travels with a batch: the IDs of its samples, its structure, their seeds, what the loop did.

Owns nothing that lives longer than a batch: no thread, no file, no global. It never loads a sample
and never reads an activation; whoever made the batch gave it a way to do so.

`batch.py` is a batch and its parts, taken apart into leaves with a row per sample, and what they
held; `tensor.py` holds the tensors that know their samples, loaded or not, `chain.py` the
operations that they record, those that take rows too, `trial.py` which those are; `padding.py` says
how they were padded.
"""

from egeria_cache.batch.batch import (
    Batch,
    Entry,
    Leaves,
    Missing,
    PartEntry,
    Rows,
    SampleId,
    Structure,
    at_rows,
    counting,
    flatten,
    geometry,
    interleaved,
    is_dense,
    is_faithful,
    is_rows,
    merge_rows,
    overlap,
    own_containers,
    take_rows,
)
from egeria_cache.batch.chain import Fold
from egeria_cache.batch.padding import Axis, Lengths, Padding
from egeria_cache.batch.tensor import (
    AbsentTensor,
    BatchTensor,
    batch_tensors,
    forget_lost,
    lost_by,
    unwrap,
    without_data,
)
from egeria_cache.batch.trial import forget_trials

__all__ = [
    "AbsentTensor", "Axis", "Batch", "BatchTensor", "Entry", "Fold", "Leaves", "Lengths", "Missing",
    "Padding", "PartEntry", "Rows", "SampleId", "Structure", "at_rows", "batch_tensors", "counting",
    "flatten", "forget_lost", "forget_trials", "geometry", "interleaved", "is_dense", "is_faithful",
    "is_rows", "lost_by", "merge_rows", "overlap", "own_containers", "take_rows", "unwrap",
    "without_data",
]  # fmt: skip
