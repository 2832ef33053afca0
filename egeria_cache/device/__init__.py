"""What an accelerator is: the only room that knows, and that names a kind of device.

Built on `torch.accelerator` and `torch.get_device_module`, so that one code serves every device
that PyTorch knows, also one that is registered from outside. What a device lacks is done without:
where there are no streams or events, or no page-locked memory, copies run in order, and whoever
starts one waits for it. It holds no model and no batch, and decides nothing about caching.

`kinds` says which devices there are, what they are called, and the states of their generators;
`streams` orders what they are given to do, `memory` copies both ways.
"""

from egeria_cache.device.kinds import (
    FOREIGN_PACKAGES,
    LEAF_FLAGS,
    autocast_kinds,
    default_device,
    device_name,
    device_of,
    fp32_precision,
    located,
    moved_to,
    random_states,
    runs_late,
    seed_everywhere,
    set_random_states,
    synchronize,
    without_autocast,
)
from egeria_cache.device.memory import (
    Answers,
    batch_to_host,
    copies_beside,
    lock_ahead,
    pinned,
    pins,
    room,
    to_device,
    to_host,
    uploaded,
)
from egeria_cache.device.streams import Event, Held, Lane, leave_captures_alone, mark

__all__ = [
    "FOREIGN_PACKAGES",
    "LEAF_FLAGS",
    "Answers",
    "Event",
    "Held",
    "Lane",
    "autocast_kinds",
    "batch_to_host",
    "copies_beside",
    "default_device",
    "device_name",
    "device_of",
    "fp32_precision",
    "leave_captures_alone",
    "located",
    "lock_ahead",
    "mark",
    "moved_to",
    "pinned",
    "pins",
    "random_states",
    "room",
    "runs_late",
    "seed_everywhere",
    "set_random_states",
    "synchronize",
    "to_device",
    "to_host",
    "uploaded",
    "without_autocast",
]
