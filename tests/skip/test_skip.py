"""The way of a batch: hits, misses, mixed batches, moves of the boundary, guards."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from egeria_cache.skip.model.frozen import FrozenPrefix
from tests.helpers.skip_harness import assert_same_run, step, ways
from tests.skip.test_modes import BATCHES, call, make


def test_mixed_batches_run_the_prefix_on_the_misses_alone(monkeypatch):
    harness, taken = make(), ways(monkeypatch)
    rows = []
    harness.model.stem.register_forward_hook(lambda m, i, o: rows.append(len(i[0])))
    assert_same_run(harness, call, [range(0, 8)])
    rows.clear()
    assert_same_run(harness, call, [[8, 1, 9, 3, 2, 10, 11, 4]], exact=False)
    assert rows == [8, 8]  # the hook sees one call of the whole batch, here and in the plain copy
    assert taken[1] == ("prefix", 4)
    assert set(harness.host.stored[harness.engine.cut]) == set(range(12))
    assert_same_run(harness, call, [[8, 1, 9, 3, 2, 10, 11, 4]], exact=False)
    assert harness.host.num_loads == 2
    assert [way for way, _ in taken] == ["full", "prefix", "replay", "replay"]


def test_what_mixed_batches_leave_behind_is_what_whole_ones_leave(monkeypatch):
    harness, taken, seen = make(), ways(monkeypatch), [8]

    def note(module, given, output):
        seen[0] = min(seen[0], len(given[0]))
        seen.extend([len(given[0])] * (len(seen) < 4))  # it is still from the fourth batch on

    harness.model.stem.register_forward_hook(note)
    for first in range(0, 20, 4):
        step(harness.model, call, harness.batch(range(first, first + 8)))
    assert (seen, [way for way, _ in taken].count("prefix")) == ([8, 8, 8, 8], 4)


def test_states_in_turns_that_are_seen_late_are_left_alone():
    harness = make()
    for n in range(24):
        harness.model.layer1.two.bias.data.fill_(n % 2)
        assert_same_run(harness, call, [range(8)])
    assert len(harness.host.changes) < 8


def test_pytorchs_counter_of_operations_counts_what_the_loop_computes_alone():
    harness, counted = make(), []
    for model in (copy.deepcopy(harness.model.eval()), harness.model, harness.model):
        with FlopCounterMode(display=False) as counter:
            call(model, harness.batch(range(8)) if model is harness.model else harness.data)
        counted.append(counter.get_total_flops())
    plain, proved, hits = counted
    assert proved == plain // 3  # of 24 samples; the proof ran beside it
    assert 0 < hits < proved


def test_a_hit_never_touches_the_prefix_or_the_raw_sample():
    harness = make()
    step(harness.model, call, harness.batch(range(8)))
    forward, reads = harness.engine._forward, Reads()

    def watched(*args, **kwargs):
        with reads:
            return forward(*args, **kwargs)

    harness.engine._forward = watched
    step(harness.model, call, harness.batch(range(8)))
    frozen = [*harness.model.stem.parameters(), *harness.model.layer1.parameters()]
    assert reads.addresses
    assert not reads.addresses & {tensor.data_ptr() for tensor in frozen}
    assert harness.reloaded == 0


class Reads(TorchDispatchMode):
    """Notes the memory of every tensor that an operator is given."""

    addresses = frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (torch.Tensor, nn.Parameter):
                self.addresses |= {leaf.data_ptr()}
        return func(*args, **(kwargs or {}))


def test_a_batch_whose_rows_are_gone_is_computed():
    harness = make()
    plain = copy.deepcopy(harness.model)
    step(harness.model, call, harness.batch(range(8)))
    batch = harness.batch(range(8))
    batch["x"].batch.planned_entry.broken = True
    ours = step(harness.model, call, batch, 1)
    step(plain, call, harness.plain(range(8)))
    assert torch.equal(ours[0], step(plain, call, harness.plain(range(8)), 1)[0])
    assert harness.reloaded == 8


def test_evaluation_and_no_grad_passes_are_served_too():
    harness = make()
    plain = copy.deepcopy(harness.model)
    FrozenPrefix([plain.stem, plain.layer1])
    for _ in range(3):
        harness.model.eval()
        plain.eval()
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            batch = harness.batch(range(8))
            with mode():
                ours = harness.model(batch["x"])
                assert torch.equal(ours, plain(harness.plain(range(8))["x"]))
        harness.model.train()
        plain.train()
    assert (harness.host.refusals, len(harness.host.stored)) == ([], 1)
    assert harness.host.num_loads == 8


# ---- moves ------------------------------------------------------------------------------------


def test_cutting_before_the_frozen_boundary_keeps_what_lies_between_in_inference_mode():
    harness = make("layer2", ("stem", "layer1", "layer2"))
    assert_same_run(harness, call, BATCHES)
    harness.engine.set_boundary("layer1", frozen="layer2")
    harness.model.train()
    assert not harness.model.layer2.training
    step(harness.model, call, harness.batch(range(8)))
    assert harness.engine.cut.boundary == "layer1"
    harness.engine.set_boundary(None, frozen="layer2")
    harness.model.train()
    assert not harness.model.layer2.training
    harness.engine.set_boundary(None)
    harness.model.train()
    assert harness.model.layer2.training


def test_the_profile_of_a_cut_tells_what_each_module_costs_and_gives():
    harness = make("layer2", ("stem", "layer1", "layer2"))
    step(harness.model, call, harness.batch(range(8)))
    profile = harness.engine.cut.profile
    assert [part.name for part in profile] == ["stem", "layer1", "layer2"]
    assert [part.row_bytes for part in profile] == [8 * 8 * 8 * 4] * 3
    times = [part.seconds_per_sample for part in profile]
    assert 0 < times[0] < times[1] < times[2]


# ---- guards -----------------------------------------------------------------------------------


def test_a_changed_prefix_is_noticed_before_anything_stale_is_served():
    harness = make()
    assert_same_run(harness, call, BATCHES * 2)
    with torch.no_grad():
        harness.model.stem[0].weight.mul_(1.5)
    num_loads = harness.host.num_loads
    assert_same_run(harness, call, BATCHES[:1])
    assert len(harness.host.changes) == 1
    assert harness.host.num_loads == num_loads
    assert_same_run(harness, call, BATCHES * 4)
    assert len(harness.host.changes) == 1
    assert harness.host.num_loads > num_loads, "cut again once the weights are still"


def test_weights_that_keep_moving_are_given_up_with_growing_patience():
    harness, num_dry_runs = make(), 0
    for n in range(60):
        cut = harness.engine.cut
        step(harness.model, call, harness.batch(range(8)))
        num_dry_runs += harness.engine.cut is not cut and harness.engine.cut is not None
        with torch.no_grad():
            harness.model.stem[0].weight.mul_(1.001 if n % 6 == 5 else 1)
    assert 1 <= num_dry_runs <= 5
