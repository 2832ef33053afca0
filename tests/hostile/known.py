"""Tries that fail today: what was seen, and why. Each fix takes a line away.

A line that is wrong in either direction fails the suite: a try that passes unexpectedly, and one
that fails in another way.
"""

from __future__ import annotations

from tests.hostile.harness import (
    Finding,
    NeedlesslyUncached,
    SilentlyWrong,
    WithoutAWord,
)


def because(outcome: type[Finding], why: str, *names: str) -> dict[str, tuple[type[Finding], str]]:
    """Give several tries one reason."""
    return dict.fromkeys(names, (outcome, why))


KNOWN: dict[str, tuple[type[Finding], str]] = {
    # test_seams.py
    **because(
        NeedlesslyUncached,
        "an alias made in C that knows nothing (said so)",
        "test_joined_and_shaped_inputs_are_served[Variable]",
    ),
    # test_batches_structures.py
    **because(
        NeedlesslyUncached,
        "samples are looked for in the first dimension alone",
        "test_batches_with_time_first_are_served[embed-collate]",
        "test_batches_with_time_first_are_served[embed-loop]",
        "test_batches_with_time_first_are_served[rnn-collate]",
        "test_batches_with_time_first_are_served[rnn-loop]",
    ),
    # test_lookahead.py
    **because(
        WithoutAWord,
        "a batch that is kept is not looked up again, and was loaded before anything was stored",
        "test_however_a_loop_passes_over_its_loaders_the_batches_are_the_same[cycled]",
    ),
    **because(
        SilentlyWrong,
        "a dry run may save the generators while a loader's thread has seeded them",
        "test_however_a_loop_passes_over_its_loaders_the_batches_are_the_same[in a thread]",
    ),
    # test_data.py
    **because(
        WithoutAWord,
        "a loader made anew over another data set each time is another one each time",
        "test_another_data_set_for_each_epoch[grows]",
    ),
}
