"""Tries that fail today: what was seen, and why. Each fix takes a line away.

A line that is wrong in either direction fails the suite: a try that passes unexpectedly, and one
that fails in another way.
"""

from __future__ import annotations

from tests.hostile.harness import (
    Finding,
    ForeignError,
    NeedlesslyUncached,
    SilentlyWrong,
    WithoutAWord,
)


def because(outcome: type[Finding], why: str, *names: str) -> dict[str, tuple[type[Finding], str]]:
    """Give several tries one reason."""
    return dict.fromkeys(names, (outcome, why))


KNOWN: dict[str, tuple[type[Finding], str]] = {
    # test_batches_structures.py
    **because(
        SilentlyWrong,
        "the loop is given a copy of the batch's dicts",
        "test_a_shared_dict_may_be_added_to_by_the_loop",
    ),
    # test_errors_batches.py
    # test_prefix_values.py
    **because(
        WithoutAWord,
        "an argument that differs at every call is rehearsed anew every time, and nothing is said",
        "test_a_new_argument_in_the_place_of_one_that_is_gone_is_another",
        "test_a_schedule_given_to_the_front_is_told",
    ),
    # test_proof.py
    **because(
        SilentlyWrong,
        "a draw that seldom decides is not seen in the few runs of the rehearsal",
        "test_rare_randomness_around_the_boundary_is_seen_or_found[3]",
        "test_rare_randomness_around_the_boundary_is_seen_or_found[10]",
    ),
    # test_served_batches.py
    **because(
        NeedlesslyUncached,
        "samples are looked for in the first dimension alone",
        "test_batches_with_time_first_are_served[embed-collate]",
        "test_batches_with_time_first_are_served[embed-loop]",
        "test_batches_with_time_first_are_served[rnn-collate]",
        "test_batches_with_time_first_are_served[rnn-loop]",
    ),
    # test_served_loops.py
    **because(
        ForeignError,
        "a checkpointed region of the front alone is refused, if of the kind that is not reentrant",
        "test_checkpointed_regions_are_served[False-ends at the boundary]",
    ),
}
