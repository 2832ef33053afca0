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
    # test_batches.py
    **because(
        WithoutAWord,
        "nothing is said where a batch does not know its samples, or is void each time",
        "test_a_batch_written_in_every_epoch_is_what_the_model_sees[by_data]",
        "test_a_batch_written_in_every_epoch_is_what_the_model_sees[by_method]",
        "test_square_batches_transposed_in_place_are_transposed",
        "test_a_batch_written_in_every_epoch_is_what_the_model_sees[by_numpy]",
    ),
    **because(
        SilentlyWrong,
        "batches are rebuilt by their constructors",
        "test_a_shared_dict_may_be_added_to_by_the_loop",
    ),
    # test_data.py
    # test_prefix.py
    **because(
        WithoutAWord,
        "nothing is said where a batch does not know its samples, or is void each time",
        "test_frozen_weights_that_decay_with_zero_gradients_move",
        "test_the_models_forward_replaced_by_the_user_later_runs",
    ),
    # test_prefix_tensors.py
    **because(
        ForeignError,
        "recomputed weights of the prefix are taken for traces",
        "test_a_front_pruned_a_little_more_every_epoch_is_right",
    ),
    # test_prefix_values.py
    **because(
        ForeignError,
        "a refused boundary that was set by hand raises where the loop could go on",
        "test_a_temperature_that_the_front_lowers_itself_is_obeyed",
    ),
    **because(
        SilentlyWrong,
        "what the front counts or lowers itself does not go on when it is skipped",
        "test_a_counter_of_the_front_that_the_head_reads_counts",
        "test_a_counter_of_the_front_that_the_loop_reads_counts",
        "test_a_temperature_that_the_loop_lowers_each_step_is_obeyed",
    ),
    **because(
        WithoutAWord,
        "nothing is said where a batch does not know its samples, or is void each time",
        "test_a_schedule_given_to_the_front_is_told",
    ),
    **because(
        NeedlesslyUncached,
        "left uncached, though it could be served",
        "test_a_schedule_given_to_the_head_is_served[float]",
    ),
    # test_proof.py
    **because(
        SilentlyWrong,
        "the proof does not see this",
        "test_rare_randomness_around_the_boundary_is_seen_or_found[3]",
        "test_rare_randomness_around_the_boundary_is_seen_or_found[10]",
    ),
}
