"""Tries that fail today: what was seen, and why. Each fix takes a line away.

A line that is wrong in either direction fails the suite: a try that passes unexpectedly, and one
that fails in another way.
"""

from __future__ import annotations

from tests.hostile.harness import Finding, NeedlesslyUncached, WithoutAWord

TIME_FIRST = "samples are looked for in the first dimension alone"
KNOWN: dict[str, tuple[type[Finding], str]] = {
    "test_joined_and_shaped_inputs_are_served[Variable]": (
        NeedlesslyUncached, "an alias made in C that knows nothing (said so)",
    ),
    **{
        f"test_batches_with_time_first_are_served[{kind}]": (NeedlesslyUncached, TIME_FIRST)
        for kind in ("embed-collate", "embed-loop", "rnn-collate", "rnn-loop")
    },
    "test_however_a_loop_passes_over_its_loaders_the_batches_are_the_same[cycled]": (
        WithoutAWord,
        "that batches are kept is said when the third of them comes again, which is later",
    ),
    "test_a_batch_written_in_every_epoch_is_what_the_model_sees[a method]": (
        WithoutAWord, "what is done to batches in another way each time is told from the fifth on",
    ),
}  # fmt: skip
