"""What a move saves is counted; what it may cost is predicted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from egeria_core.policies import HarmEstimate, Movement
from egeria_core.savings import BACKWARD_SHARE, saved_parts
from egeria_core.watch.forward import ForwardTrace, LayerMap
from tests.helpers.core_nets import mlp


def test_the_count_is_that_of_the_products() -> None:
    model = mlp(64, 16, 32, 10)
    layers = LayerMap(model, r"[024]", 7)
    model(torch.randn(8, 64))
    layers.resolve()
    products = [64 * 16, 16 * 32, 32 * 10]
    parts = [sum(products[: k + 1]) / sum(products) for k in range(3)]
    assert layers.parts == pytest.approx(parts)
    saves = saved_parts(layers.parts, [1, 1, 1])
    assert saves == pytest.approx([0, *(BACKWARD_SHARE * part for part in parts[:2])])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_counted(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(11, 16), kind(16, 16))
    trace = ForwardTrace(model, ["1"])
    model(torch.randint(11, (4, 8)))
    trace.close()
    weights = sum(w.numel() for w in model[1].parameters() if w.dim() == 2)
    assert trace.upto["1"] == pytest.approx(2 * 32 * weights)


# The prediction on hand-made traces, against the formula written out.


def falling(count: int, *, lr: float = 0.1, noise: float = 0.01) -> list[Movement]:
    """A loss that falls by 2 per unit of learning rate; three layers bring 1/2, 1/3 and 1/6."""
    draw, speeds = random.Random(0), (0.03, 0.02, 0.01)
    sums = [lr * (n + 0.5) for n in range(count)]
    losses = [5 - 2 * at + noise * draw.gauss(0, 1) for at in sums]
    rests = ((1 / (1 + n), 1 / (1 + n), 1.0) for n in range(count))
    return [Movement(*one) for one in zip(losses, sums, [speeds] * count, rests, strict=True)]


def test_harm_is_the_share_times_what_is_left_to_gain() -> None:
    estimate = HarmEstimate()
    movements = falling(24)
    for movement in movements:
        estimate.observe(movement)
    window = movements[-8:]
    n = len(window)
    x, y = [m.rate for m in window], [m.loss for m in window]
    mean_x, mean_y = sum(x) / n, sum(y) / n
    sxx = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sxx
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (n - 2) / sxx)
    assert estimate.gain(0.4) == pytest.approx((-slope + error) * 0.4)
    assert estimate.gain(0.4) == pytest.approx(0.8, rel=0.2)
    assert estimate.gain(1e9) == pytest.approx(mean_y), "not more than there is"
    assert estimate.gain(0.0) == 0.0
    assert estimate.shares(0) == pytest.approx([0, 1 / 2, 5 / 6, 1])
    assert estimate.shares(1) == pytest.approx([0, 0, 2 / 3, 1])


def test_a_rate_that_moved_by_its_last_bit_alone_bounds_nothing() -> None:
    estimate = HarmEstimate()
    for n in range(8):
        estimate.observe(Movement(5 - n / 10, 10 + 2e-15 * (n == 7), (0.1,), (1.0,)))
    assert estimate.gain(1.0) == pytest.approx(4.45), "not more than there is"


def test_a_share_takes_the_error_with_which_it_was_read() -> None:
    estimate, parts = HarmEstimate(), ((0.03, 0.02), (0.01, 0.02))
    for n in range(24):
        estimate.observe(Movement(5 - n / 10, n / 10, parts[n % 2], (1.0, 1.0)))
    # Of the last eight, four of each: 0.02 of 0.04 on average; 0.03 - 0.025, 0.01 - 0.015.
    error = 0.005 * math.sqrt(8 / 7) / math.sqrt(8) / 0.04
    assert estimate.shares(0) == pytest.approx([0, 0.5 + error, 1])


def test_a_layer_rests_when_it_is_slow_against_its_own_peak_for_three_readings() -> None:
    estimate = HarmEstimate()
    speeds = [0.1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    rests = []
    for n, speed in enumerate(speeds):
        estimate.observe(Movement(1.0, n, (1.0,), (speed,)))
        rests.append(estimate.rests(0))
    # The mean of five falls to 0.2 at the tenth zero reading but one; two more must follow.
    means = [
        sum(speeds[max(0, n - 4) : n + 1]) / len(speeds[max(0, n - 4) : n + 1]) for n in range(14)
    ]
    slow = [mean <= 0.2 * max(means[: n + 1]) for n, mean in enumerate(means)]
    assert rests == [all(slow[max(0, n - 2) : n + 1]) and n >= 2 for n in range(14)]
    assert any(rests)


def test_what_was_not_read_or_is_not_finite_is_left_out() -> None:
    estimate = HarmEstimate()
    for n, movement in enumerate(falling(12)):
        estimate.observe(movement)
        decrease = (math.nan, 0.02, None) if n % 2 else (0.03, 0.02, 0.01)
        estimate.observe(Movement(math.nan, 0.0, (9.0, 9.0, 9.0), (1.0, 1.0, 1.0)))
        estimate.observe(Movement(movement.loss, movement.rate, decrease, (0.1, None, None)))
    shares = estimate.shares(0)
    assert shares is not None
    assert shares[1:3] == pytest.approx([0.5, 5 / 6])
    estimate = HarmEstimate()
    for movement in falling(12):
        estimate.observe(Movement(movement.loss, movement.rate, (0.1, None, 0.1), movement.speed))
    assert estimate.shares(0) is None, "a layer that was not read may bring anything"
    assert estimate.shares(2) == [0, 0, 0, 1]


def test_steps_that_do_not_bring_the_loss_down_predict_nothing() -> None:
    estimate = HarmEstimate()
    for n in range(8):
        estimate.observe(Movement(1.0, n, (0.1, -0.3), (1.0, 1.0)))
    assert estimate.shares(0) is None


@pytest.mark.parametrize("falls", [False, True])
def test_an_unknown_schedule_is_taken_to_stay(falls: bool) -> None:
    estimate = HarmEstimate()
    rate = 0.0
    for n in range(30):
        lr = 0.1 * (1 - n / 100) if falls else 0.1
        estimate.observe(Movement(1.0, rate + 2 * lr, (0.1, 0.1), (1.0, 1.0)))
        rate += 4 * lr
    # Between the middles of the last two readings of four steps.
    lately = 0.1 * (1 - 28.5 / 100) if falls else 0.1
    assert estimate.assumed_rate(50, 4) == pytest.approx(50 * lately, rel=0.02)


numbers = st.floats(-10, 10, allow_nan=False)
rows = st.lists(
    st.tuples(numbers, st.tuples(numbers, numbers), st.tuples(st.floats(0, 1), st.floats(0, 1))),
    min_size=5,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(0, 1))
def test_shares_grow_with_depth_and_lie_between_nothing_and_all(row: list, frozen: int) -> None:
    estimate = HarmEstimate()
    for n, (loss, decrease, speed) in enumerate(row):
        estimate.observe(Movement(loss, float(n), decrease, speed))
    shares = estimate.shares(frozen)
    if shares is not None:
        assert shares == sorted(shares)
        assert shares[0] == 0
        assert shares[-1] <= 1
    assert estimate.gain(1.0) >= 0 or min(r[0] for r in row) <= 0
