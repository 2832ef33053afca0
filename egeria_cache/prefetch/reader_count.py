"""How many readers keep up with training, if any: decided by what reading and waiting cost.

Pure: it is told of every batch of hits, in seconds, and looks at no clock.
"""

from __future__ import annotations

from collections import deque

__all__ = ["ReaderCount"]

_SHARE = 1 / 8
"""Weight of the latest batch in the means."""
_SETTLED = 24
"""Batches after which the means say what another number of readers has brought."""
_MAX_PATIENCE = 4096
_WAITING = 0.05
"""Part of the time between two batches that training may wait for reads."""
_GAIN = 0.95
"""Of the time between two batches, what it must have come down to for a further reader to stay."""
_IDLE = 0.6
"""Readers are let go where those that are left would be busy for no larger part of the time."""
_SHORT_S, _BRIEF_S = 1e-3, 0.6e-3
"""A reader whose reads are shorter may be none at all, and is needed where they take training
longer. Beside training a read takes a multiple: both threads wait for the interpreter. On two cores
10 records of 16 KiB that training reads itself cost it 0.3 ms, and those of a reader 0.8; with 48
it is 0.4 ms and 1.2."""
_SOON, _FEW = 4, 8
"""Batches after which reads that became long go back to a reader; and by how many that is told: one
that took long among them is none."""


class ReaderCount:
    """Counts the readers that are wanted; from 0 to `most`.

    One reader, while it keeps up. Another is tried while training was seen to wait for reads that
    keep the readers busy, and stays if batches then came faster: it takes a core, and the
    interpreter, from training as well. The longer it did not help, the later it is tried again.
    None where reads are so short that it costs training more to hand them over than to read.

    Args:
        most: As many as there are cores to read on.
    """

    def __init__(self, most: int) -> None:
        self.wanted, self.most = 1, most
        self._read_s = self._waited_s = self._interval_s = 0.0
        self._num_batches = 0
        """Since the number changed."""
        self._patience = self._patience_alone = _SETTLED
        self._last_s: deque[float] = deque(maxlen=_FEW)
        """What reads cost since there is no reader."""
        self._interval_before_s = 0.0
        """With one reader less, while another is on trial."""

    def batch(
        self, *, read_s: float, waited_s: float, interval_s: float, may_be_none: bool = True
    ) -> int:
        """Note a batch of hits; return how many readers are wanted.

        Args:
            read_s: What it cost a reader thread, or the training thread if there is no reader.
            waited_s: What of that the training thread waited for.
            interval_s: From the request for it to the request for the next.
            may_be_none: Whether the training thread can read such batches itself.
        """
        # The first batch alone after a change is no mean yet.
        share = _SHARE if self._num_batches else 1.0
        self._num_batches += 1
        # Someone saved a checkpoint, or looked at the validation set: that is no pace of training.
        interval_s = min(interval_s, 8 * self._interval_s) if share < 1 else interval_s
        self._read_s += share * (read_s - self._read_s)
        self._waited_s += share * (waited_s - self._waited_s)
        self._interval_s += share * (interval_s - self._interval_s)
        if self.wanted == 0:
            self._last_s.append(read_s)
            self._judge_alone(may_be_none=may_be_none)
        elif self._num_batches >= _SETTLED:
            self._judge(may_be_none=may_be_none)
        return self.wanted

    def _judge_alone(self, *, may_be_none: bool) -> None:
        last_s = sorted(self._last_s)
        if may_be_none and (len(last_s) < _SOON or last_s[len(last_s) // 2] <= _BRIEF_S):
            return
        lasted = self._num_batches > self._patience_alone
        self._patience_alone = _SETTLED if lasted else min(2 * self._patience_alone, _MAX_PATIENCE)
        self._last_s.clear()
        self._turn_to(1)

    def _judge(self, *, may_be_none: bool) -> None:
        busy = self._read_s / max(self._interval_s, 1e-9)
        if self._interval_before_s:
            helped = self._interval_s <= _GAIN * self._interval_before_s
            self._interval_before_s = 0.0
            if helped:
                self._patience = _SETTLED
            else:
                self._patience = min(2 * self._patience, _MAX_PATIENCE)
                self._turn_to(self.wanted - 1)
        elif self.wanted > 1 and busy <= _IDLE * (self.wanted - 1):
            self._turn_to(self.wanted - 1)
        elif (
            self.wanted < self.most
            and self._num_batches >= self._patience
            and self._waited_s > _WAITING * self._interval_s
            and busy > _IDLE * self.wanted
        ):
            self._interval_before_s = self._interval_s
            self._turn_to(self.wanted + 1)
        elif (
            may_be_none
            and self.wanted == 1
            and self._read_s < _SHORT_S
            and self._num_batches >= self._patience_alone
        ):
            self._turn_to(0)

    def _turn_to(self, wanted: int) -> None:
        self.wanted, self._num_batches = wanted, 0
