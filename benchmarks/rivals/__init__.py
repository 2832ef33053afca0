"""Ways to freeze that others have published, as policies of the controller's: to compare with.

Each is an object of `egeria_core.Policy`, and needs nothing else of the controller; those that
measure bring a meter (`egeria_core.watch.Meter`). METHODS.md has a card for each.
"""

from .autofreeze import AutoFreezePolicy
from .freezeout import FreezeOutPolicy
from .linear import LinearPolicy
from .pipetransformer import PipeTransformerPolicy
from .skipconv import SkipConvPolicy
from .smartpipe import SmartPipePolicy

__all__ = [
    "AutoFreezePolicy",
    "FreezeOutPolicy",
    "LinearPolicy",
    "PipeTransformerPolicy",
    "SkipConvPolicy",
    "SmartPipePolicy",
]
