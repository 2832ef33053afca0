"""Order is proved: whatever is queued runs in any order that the events allow, and it is right.

Each property is also run with one wait, one slot's keeping or one buffer's keeping taken away. It
must fail then, or it proves nothing.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from egeria_cache import device as devices
from egeria_cache.prefetch.ring import Ring
from egeria_cache.skip.state import guards
from egeria_cache.skip.state.guards import ContentProbe
from tests.device.late import late
from tests.device.simulated.runs import DEVICE

HERE = torch.device("privateuseone", 0)  # its name until it is registered
ORDERS = st.one_of(st.sampled_from(["nothing", "main", "lanes"]), st.integers(0, 2**32 - 1))
QUICK = settings(
    max_examples=30, deadline=None, database=None, derandomize=True,
    phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
)  # fmt: skip


FILL = -7.0
"""What stands in the padding."""


def row_of(key, version=0):
    return torch.full((3,), float(key + 1000 * version))


# ---- the ring ------------------------------------------------------------------------------------


def size_of(keys, padded):
    return max(key % 3 + 1 for key in keys) if padded else 3


def read_rows(keys, padded):
    """What a reader gives: page-locked rows, which it does not keep."""
    size = size_of(keys, padded) if len(keys) else 3
    rows = torch.empty((len(keys), size), pin_memory=devices.pins(HERE))
    for row, key in zip(rows, keys, strict=True):
        row.copy_(expected(key, size, padded))
    return {"a": rows}


def expected(key, size, padded):
    row = row_of(key)[:size].clone()
    if padded:
        row[key % 3 + 1 :] = FILL
    return row


@QUICK
@example(order="lanes", padded=False, draws=random.Random(0))
@given(
    order=ORDERS, padded=st.booleans(),
    draws=st.randoms(use_true_random=False),
)  # fmt: skip
def ring_property(order, padded, draws):
    window, size = 2, 4
    with late(order) as device:
        ring = Ring(
            {"a": torch.empty(1, 3)}, (2 * window + 2) * size, 60, HERE,
            padded={"a": (((0, False),), FILL)} if padded else {},
        )  # fmt: skip
        draws_of = np.zeros(size, np.int64)
        ahead, results = {}, []
        plans = [draws.sample(range(60), size) for _ in range(14)]
        for number in range(len(plans)):
            for coming in range(number, min(number + window + 1, len(plans))):
                if coming in ahead:
                    continue
                keys = np.array(plans[coming])
                new = keys[ring.adopt(coming, keys, draws_of)]
                assert ring.insert(coming, new, draws_of[: len(new)], read_rows(new, padded), {})
                ahead[coming] = ring.place(keys, draws_of)
            ring.release_before(number - window)
            sizes = {"a": [size_of(plans[number], True)]} if padded else None
            rows = ring.gather(ahead[number], sizes)["a"]
            results.append((plans[number], rows * 2))  # a kernel of the step reads them
            del rows
        assert device.num_waits == 0
        answers = [(keys, rows.cpu()) for keys, rows in results]
        assert device.num_late
    for keys, rows in answers:
        wanted = [expected(key, size_of(keys, padded), padded) * 2 for key in keys]
        assert torch.equal(rows, torch.stack(wanted))


# ---- the writer's copies -------------------------------------------------------------------------


@QUICK
@given(order=ORDERS)
def transfer_property(order):
    """What is captured arrives as it was, though the step goes on and reuses its memory."""
    with late(order) as device:
        jobs = []
        for step in range(8):
            x = torch.full((4, 3), float(step), device=DEVICE)
            captured = x * 3 + 1
            jobs.append((step, *devices.batch_to_host({"a": captured, "ids": [1, 2, 3, 4]})))
            del x, captured
            torch.full((4, 3), -1.0, device=DEVICE)  # may get the same memory
            if len(jobs) > 2:
                step, fields, ready = jobs.pop(0)
                if step % 3:  # every third was dropped: the queue was full
                    for event in ready:
                        event.synchronize()
                    assert torch.equal(fields["a"], torch.full((4, 3), step * 3.0 + 1))
        assert device.num_late


# ---- the guard's verdicts ------------------------------------------------------------------------


@QUICK
@given(order=ORDERS, change_at=st.integers(0, 6))
def guard_property(order, change_at):
    """What did not change is never reported; what did is, once the device has come so far."""
    with pytest.MonkeyPatch.context() as patch, late(order) as device:
        patch.setattr(guards, "LOOK_EVERY_S", 0.0)
        weights = [
            torch.arange(40.0, device=DEVICE),
            torch.ones(3, dtype=torch.int64, device=DEVICE),
        ]
        probe = ContentProbe(weights)
        for _ in range(change_at):
            assert not probe.changed()
            torch.full((1,), 1.0, device=DEVICE)
        weights[0].data.add_(1.0)
        seen = [probe.changed()]
        for _ in range(3):
            device.drain()
            seen.append(probe.changed())
        assert any(seen)


# ---- the prefetcher, and all of it in a training run ---------------------------------------------


class Inline:
    """In the place of the reader threads: what is handed in is done at once, by this thread."""

    def submit(self, work, *args):
        from concurrent.futures import Future

        done = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def close(self):
        """Nothing is under way."""


def trained(directory, gate, order, whole_bytes=0, **kwargs):
    """A run whose readers work in this thread, under the order; the writer has its own."""
    from egeria_cache.cache import loader_api
    from egeria_cache.prefetch import prefetcher
    from tests.device.simulated.runs import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_api, "ReaderThreads", Inline)
        patch.setattr(prefetcher, "WHOLE_BYTES", whole_bytes)
        patch.setattr(torch.optim.SGD, "__init__", _one_by_one(torch.optim.SGD.__init__))
        with late(order) as device:
            found = run(directory, gate=gate, **kwargs)
            device.drain()
        return found


def _one_by_one(make):
    return lambda self, params, **kwargs: make(self, params, foreach=False, **kwargs)


@pytest.mark.parametrize(
    ("order", "whole_bytes"),
    [("nothing", 0), ("main", 0), ("lanes", 0), (1, 0), ("lanes", 1 << 20), (2, 1 << 20)],
)
def test_a_training_run_is_right_in_any_order(tmp_path, order, whole_bytes):
    settings = {"epochs": 3, "cache_kwargs": {"ring_batches": 2}, "pin_memory": True}
    cached = trained(tmp_path / "a", "always", order, whole_bytes, **settings)
    computed = trained(tmp_path / "b", "never", 7, **settings)
    assert cached[0] == computed[0]
    assert cached[2].hits == 2 * 48


# ---- the evaluator -------------------------------------------------------------------------------


@QUICK
@given(order=ORDERS)
def evaluator_property(order):
    """The weights and activations that are judged are those of their step."""
    from egeria_core.reference.capture import Call, Probe, copy_weights
    from egeria_core.reference.references import InputItem

    with late(order) as device:
        layer = torch.nn.Linear(3, 3, bias=False).to(DEVICE)
        layer.requires_grad_(False)
        items = []
        for step in range(5):
            layer.weight.copy_(torch.full((3, 3), float(step), device=DEVICE))
            x = torch.full((2, 3), float(step + 1), device=DEVICE) * 2
            probe = Probe([Call("0", (devices.to_host(x),), {}, {})], 2)
            item = InputItem(
                step=step, layer=0, probe=probe, judge=False, refresh=True,
                weights=copy_weights([layer]), ready=devices.mark(HERE),
            )  # fmt: skip
            del x
            items.append(item)
        for step, item in enumerate(items):
            item.arrive()
            assert torch.equal(item.weights[0]["weight"], torch.full((3, 3), float(step)))
            assert torch.equal(item.probe.calls[0].args[0], torch.full((2, 3), (step + 1) * 2.0))
        assert device.num_late


# ---- what is taken away is missed ----------------------------------------------------------------


def nothing(*args, **kwargs):
    return None


MUTATIONS = {
    # A gather does not wait for the copy of its rows.
    "gather before its copy": (ring_property, [(devices.Lane, "lead", nothing)]),
    # A slot is written again while an earlier gather still reads it.
    "slot freed early": (ring_property, [(devices.Lane, "follow", nothing)]),
    # Rows are given back to the pinned pool while their copy to the device is still to run.
    "pinned rows reused": (ring_property, [(devices.Held, "hold", nothing)]),
    # What the step wrote to memory is copied to the host before it was written.
    "copy before its kernel": (
        transfer_property, [(devices.Lane, "follow_current", nothing)]
    ),
    # The writer reads the rows before they have arrived.
    "rows read before they came": (
        transfer_property, [(devices.Lane, "mark", lambda lane: SimpleNamespace(
            query=lambda: False, synchronize=nothing))]
    ),
    # Tensors of the step, and dropped copies, are given back while they are copied.
    "sources freed early": (transfer_property, [(devices.Held, "hold", nothing)]),
    # The guard reads its verdict without asking whether it is there.
    "verdict read too soon": (
        guard_property, [("egeria_cache.device", "_is_past", lambda event: True)]
    ),
    # The evaluator does not wait for the weights it is given.
    "weights judged before they came": (
        evaluator_property, [("egeria_core.reference.references.InputItem", "arrive", nothing)]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "prove", [ring_property, transfer_property, guard_property, evaluator_property]
)
def test_what_is_read_is_right_in_any_order(prove):
    """A ring's rows, the writer's copies, the guard's verdicts, what an evaluator judges."""
    prove()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_the_order_gives_wrong_numbers(name):
    prove, changes = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        for owner, attribute, value in changes:
            if isinstance(owner, str):
                patch.setattr(f"{owner}.{attribute}", value)
            else:
                patch.setattr(owner, attribute, value)
        with pytest.raises(AssertionError):
            prove()
