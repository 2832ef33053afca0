"""Tries that fail today: what was seen, and why. Each fix takes a line away.

A line that is wrong in either direction fails the suite: a try that passes unexpectedly, and one
that fails in another way.
"""

from __future__ import annotations

from tests.hostile.harness import (
    Finding,
    ForeignError,
    NeedlesslyUncached,
    NotFound,
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
        "test_a_batch_written_in_place_is_what_the_model_sees[by_operator]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_index]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_numpy]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_array]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_data]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_view]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_row]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_unbind]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_chunk]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_transposed]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_out]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_dlpack]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_dlpack_of_numpy]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_copy]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_mask]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_foreach]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_relu]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_storage]",
        "test_a_batch_written_in_every_epoch_is_what_the_model_sees[by_method]",
        "test_a_batch_written_in_every_epoch_is_what_the_model_sees[by_operator]",
        "test_a_batch_written_in_every_epoch_is_what_the_model_sees[by_numpy]",
        "test_an_alias_that_is_written_later_writes_the_batch[numpy]",
        "test_an_alias_that_is_written_later_writes_the_batch[data]",
        "test_an_alias_that_is_written_later_writes_the_batch[view]",
        "test_an_alias_that_is_written_later_writes_the_batch[dlpack]",
        "test_an_alias_that_is_written_later_writes_the_batch[memoryview]",
        "test_an_alias_that_is_written_later_writes_the_batch[expanded]",
        "test_an_alias_that_is_written_later_writes_the_batch[row]",
    ),
    **because(
        SilentlyWrong,
        "an alias of an absent leaf is written and nobody notices",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_detached]",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_set]",
        "test_an_alias_that_is_written_later_writes_the_batch[detached]",
    ),
    **because(
        SilentlyWrong,
        "the tag does not notice that the tensor became another",
        "test_a_batch_written_in_place_is_what_the_model_sees[by_new_data]",
        "test_square_batches_transposed_in_place_are_transposed",
    ),
    **because(
        ForeignError,
        "the tag does not notice that the tensor became another",
    ),
    **because(
        SilentlyWrong,
        "the self-test collates into the batch that the loop is using",
        "test_a_collate_function_may_use_its_buffer_again[True-False]",
        "test_a_collate_function_may_use_its_buffer_again[True-True]",
    ),
    **because(
        SilentlyWrong,
        "batches are rebuilt by their constructors",
        "test_a_shared_dict_may_be_added_to_by_the_loop",
    ),
    **because(
        ForeignError,
        "batches are rebuilt by their constructors",
    ),
    # test_data.py
    **because(
        SilentlyWrong,
        "the data set is not asked again",
    ),
    **because(
        SilentlyWrong,
        "plain values of modules, arguments and globals are not watched",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-attribute]",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-attribute around]",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-class attribute]",
    ),
    **because(
        SilentlyWrong,
        "the address does not hold all that decides between two runs",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-around]",
    ),
    **because(
        SilentlyWrong,
        "code that is replaced is not watched",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-forward]",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-instance forward]",
    ),
    **because(
        SilentlyWrong,
        "hooks are not watched",
        "test_a_front_whose_code_changed_between_two_runs_is_another[interrupted-hook]",
    ),
    # test_prefix.py
    **because(
        WithoutAWord,
        "nothing is said where a batch does not know its samples, or is void each time",
        "test_frozen_weights_that_decay_with_zero_gradients_move",
        "test_the_models_forward_replaced_by_the_user_later_runs",
    ),
    **because(
        SilentlyWrong,
        "code that is replaced is not watched",
        "test_a_forward_that_is_patched_runs[function-early]",
        "test_a_forward_that_is_patched_runs[function-middle]",
        "test_a_forward_that_is_patched_runs[method-early]",
        "test_a_forward_that_is_patched_runs[method-middle]",
        "test_a_forward_that_is_patched_runs[partial-early]",
        "test_a_forward_that_is_patched_runs[partial-middle]",
    ),
    **because(
        SilentlyWrong,
        "hooks are not watched",
        "test_a_hook_that_joins_the_front_is_called[pre with kwargs-middle]",
    ),
    # test_prefix_tensors.py
    **because(
        NotFound,
        "the audit has no floor",
    ),
    **because(
        SilentlyWrong,
        "plain values of modules, arguments and globals are not watched",
    ),
    **because(
        NeedlesslyUncached,
        "equal values written again void what is stored",
    ),
    **because(
        WithoutAWord,
        "nothing is said where a batch does not know its samples, or is void each time",
    ),
    **because(
        ForeignError,
        "recomputed weights of the prefix are taken for traces",
        "test_a_front_pruned_a_little_more_every_epoch_is_right",
    ),
    **because(
        ForeignError,
        "a part of the front that is thawed is refused by raising, in mid-training",
    ),
    # test_prefix_values.py
    **because(
        SilentlyWrong,
        "plain values of modules, arguments and globals are not watched",
        "test_a_setting_that_changes_is_obeyed[int]",
        "test_a_setting_that_changes_is_obeyed[bool]",
        "test_a_setting_that_changes_is_obeyed[None]",
        "test_a_setting_that_changes_is_obeyed[tuple]",
        "test_a_setting_that_changes_is_obeyed[enum]",
        "test_a_setting_that_changes_is_obeyed[set]",
        "test_a_setting_that_changes_is_obeyed[list that grows]",
        "test_a_setting_that_changes_is_obeyed[dict of dicts]",
        "test_a_setting_that_changes_is_obeyed[partial]",
        "test_a_setting_that_changes_is_obeyed[bound method]",
        "test_a_setting_of_torchs_own_modules_is_obeyed[LayerNorm.eps]",
        "test_a_setting_of_torchs_own_modules_is_obeyed[Hardtanh.max_val]",
        "test_a_setting_of_torchs_own_modules_is_obeyed[Softplus.beta]",
        "test_a_setting_of_torchs_own_modules_is_obeyed[ELU.alpha]",
    ),
    **because(
        SilentlyWrong,
        "code that is replaced is not watched",
    ),
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
        ForeignError,
        "a boundary that has to be given up raises",
    ),
    **because(
        SilentlyWrong,
        "the data set is not asked again",
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
        ForeignError,
        "a refused boundary that was set by hand raises where the loop could go on",
        "test_a_statistic_of_the_batch_is_seen[maximum of each channel]",
        "test_a_statistic_of_the_batch_is_seen[cumulative sum]",
        "test_a_statistic_of_the_batch_is_seen[cumulative maximum]",
        "test_a_statistic_of_the_batch_is_seen[row before]",
        "test_a_statistic_of_the_batch_is_seen[last row]",
        "test_a_statistic_of_the_batch_is_seen[rank]",
        "test_a_statistic_of_the_batch_is_seen[softmax over the batch]",
        "test_a_statistic_of_the_batch_is_seen[standard deviation]",
        "test_a_statistic_of_the_batch_is_seen[nonzero]",
        "test_a_statistic_is_seen_in_the_last_partial_batch[row before]",
    ),
    **because(
        SilentlyWrong,
        "the proof does not see this dependence between samples",
        "test_a_statistic_of_the_batch_is_seen[minimum]",
    ),
    **because(
        ForeignError,
        "a boundary that has to be given up raises",
    ),
    **because(
        SilentlyWrong,
        "the proof does not see this",
        "test_rare_randomness_around_the_boundary_is_seen_or_found[3]",
        "test_rare_randomness_around_the_boundary_is_seen_or_found[10]",
    ),
    **because(
        SilentlyWrong,
        "only the boundary is held until a tagged batch has come",
    ),
}
