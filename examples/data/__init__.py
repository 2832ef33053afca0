"""The data sets of the paper's four tasks, read from the files that their makers publish.

Each names its samples (`sample_id`) so that a cache finds them again when files are added or listed
in another order, and says which version of a file it read (`sample_version`) so that a cache never
serves what was computed from an older one. Rows have fixed shapes, so that they can be cached.
"""

from __future__ import annotations

from data.cifar10 import Cifar10
from data.files import DataError
from data.image_folder import ImageFolder
from data.squad import Squad
from data.text_pairs import TextPairs
from data.tokenizer import Tokenizer
from data.voc import VocSegmentation

__all__ = [
    "Cifar10",
    "DataError",
    "ImageFolder",
    "Squad",
    "TextPairs",
    "Tokenizer",
    "VocSegmentation",
]
