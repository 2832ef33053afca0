"""Any order of events in training on padded batches, against the same training without a cache."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egeria_cache import EgeriaLoader
from tests.helpers.sentences import Encoder, Sentences, pad_left, pad_right
from tests.padded.test_loops import Run, assert_same

FRONTS = ((), ("embed", "layers.0"), ("embed", "layers.0", "layers.1"))

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("epoch"), st.permutations(range(24)), st.integers(1, 9)),
        st.tuples(st.just("move"), st.integers(0, 2), st.none()),
    ),
    min_size=3,
    max_size=9,
)


@given(EVENTS, st.sampled_from([pad_right, pad_left]), st.integers(0, 2))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_epochs_and_moves(events, collate, lasting):
    data = Sentences(24)
    data.tokens[: 8 * lasting] = [row[:4].repeat(2) for row in data.tokens[: 8 * lasting]]
    with tempfile.TemporaryDirectory() as directory:
        plain = Run(Encoder, data, collate)
        served = Run(Encoder, data, collate, Path(directory, "cache"))
        assert served.cache is not None
        for run in (plain, served):  # a loss that jumps makes 1e-6 of rounding 6e-5 in one step
            run.optimizer = torch.optim.SGD(run.model.parameters(), 0.02)
        with served.cache:
            for kind, what, size in events:
                for run in (plain, served):
                    if kind == "move":
                        run.move(*FRONTS[what])
                        continue
                    batches = [what[i : i + size] for i in range(0, 24, size)]
                    run.loader = (
                        run.loader._around(batches)
                        if isinstance(run.loader, EgeriaLoader)
                        else type(run.loader)(data, batch_sampler=batches, collate_fn=collate)
                    )
                    run.epochs(1)
            assert_same(plain, served)
            assert served.cache.stats().audit_failures == 0
