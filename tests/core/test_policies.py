"""Algorithm 1 on hand-made traces with known answers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from egeria_cache import BoundaryError
from egeria_core import Bootstrap, ControllerConfig, Policy, StaticPolicy, sp_loss
from egeria_core.policies import PlasticityPolicy, Reading, make_policy
from egeria_core.rules import TenfoldDrop


def feed(
    policy: Policy,
    values: Iterable[float],
    *,
    layer: int | None = None,
    num_layers: int = 4,
    lr: float = 0.1,
    start: int = 0,
) -> list[int]:
    """Give one value per step, of the front layer unless said otherwise."""
    answers = [0] if not hasattr(policy, "frozen") else [policy.frozen]
    for i, value in enumerate(values):
        at = answers[-1] if layer is None else layer
        reading = Reading(step=start + i, num_layers=num_layers, lr=(lr,), value=value, layer=at)
        answers.append(policy.observe(reading))
    return answers[1:]


def by_hand(values: list[float], window: int, tolerance: float) -> int | None:
    """Algorithm 1 for one layer, with NumPy: index of the reading that freezes it."""
    smooth: list[float] = []
    threshold, stale = 0.0, 0
    for k in range(len(values)):
        smooth.append(float(np.mean(values[max(0, k + 1 - window) : k + 1])))
        tail = smooth[-window:]
        slope = abs(np.polyfit(np.arange(len(tail)), tail, 1)[0]) if len(tail) > 1 else 0.0
        if k < 3:
            threshold = max(threshold, tolerance * slope)
            continue
        stale = stale + 1 if slope < threshold or slope == 0 else 0
        if stale == window:
            return k
    return None


@pytest.mark.parametrize("window", [2, 4, 10])
@pytest.mark.parametrize("tolerance", [0.1, 0.2, 0.4])
def test_algorithm_1_equals_a_numpy_version_on_a_noisy_falling_curve(
    window: int, tolerance: float
) -> None:
    rng = np.random.default_rng(window)
    values = [float(np.exp(-i / 8) + 0.01 * rng.normal()) for i in range(120)]
    expected = by_hand(values, window, tolerance)
    answers = feed(PlasticityPolicy(window, tolerance), values, layer=0)
    assert expected is not None
    assert answers.index(1) == expected


@pytest.mark.parametrize("way", [-1.0, 1.0])
def test_a_curve_that_keeps_falling_or_rising_is_not_stale(way: float) -> None:
    """The printed s < T, signed, would call it stale at once."""
    assert feed(PlasticityPolicy(3), [100.0 + way * i for i in range(60)])[-1] == 0


def test_the_counter_asks_for_stale_readings_in_a_row() -> None:
    flat = [8.0, 4.0, 2.0, *[1.0] * 5]
    policy = PlasticityPolicy(4)
    jumps = [*flat, 9.0, *[1.0] * 5, 9.0, *[1.0] * 5]
    assert feed(policy, jumps)[-1] == 0
    assert feed(policy, [1.0] * 20, layer=0)[-1] >= 1


def test_counter_and_history_start_afresh_for_the_next_layer() -> None:
    """Algorithm 1 as printed keeps the counter, and the next layer would freeze at once."""
    policy = PlasticityPolicy(3)
    first = feed(policy, [8.0, 4.0, *[1.0] * 30])
    freezes = [i for i in range(1, len(first)) if first[i] > first[i - 1]]
    assert len(freezes) >= 2
    assert freezes[1] - freezes[0] >= 3 + 3, "fewer than calibration plus W readings"


def test_the_last_layer_never_freezes() -> None:
    assert feed(PlasticityPolicy(2), [1.0] * 200, num_layers=3)[-1] == 2


def test_a_layer_that_never_moves_does_not_hold_up_the_rest() -> None:
    assert feed(PlasticityPolicy(3), [0.0] * 10)[-1] == 1


def test_readings_of_another_layer_and_broken_ones_are_left_out() -> None:
    policy = PlasticityPolicy(3)
    feed(policy, [5.0, float("nan"), float("inf"), 4.0], layer=0)
    feed(policy, [7.0] * 20, layer=2)
    assert policy.frozen == 0
    assert policy.state_dict()["readings"] == [5.0, 4.0]


def test_a_tenfold_drop_unfreezes_all_and_halves_the_window() -> None:
    policy = PlasticityPolicy(10)
    assert feed(policy, [4.0, 2.0, *[1.0] * 60])[-1] == 3
    assert feed(policy, [1.0], lr=0.05)[-1] == 3
    assert feed(policy, [1.0], lr=0.1 * 0.1)[-1] == 0
    assert policy.window == 5
    answers = feed(policy, [4.0, 2.0, *[1.0] * 20], lr=0.01)
    assert answers.index(1) < 15, "refreezing waits for the halved window only"


def test_the_drop_counts_from_the_frontmost_freeze_and_for_every_group() -> None:
    rule = TenfoldDrop()
    rule.should_unfreeze(1, (0.1, 0.5), 0)
    assert not rule.should_unfreeze(2, (0.05, 0.25), 1)
    assert not rule.should_unfreeze(3, (0.02, 0.02), 2), "one group has only halved twice"
    assert rule.should_unfreeze(4, (0.01, 0.02), 2)


def test_guideline_gives_the_papers_interval() -> None:
    for total, least, most in ((78_000, 300, 330), (10, 1, 1)):
        assert least <= ControllerConfig(total_steps=total).interval(7, "plasticity") <= most


def test_static_moves_at_its_steps_and_knows_its_names() -> None:
    policy = StaticPolicy([(2, "a"), (4, "b"), (6, None)])
    policy.bind(["a", "b"])
    steps = range(8)
    answers = [policy.observe(Reading(step=s, num_layers=3, lr=(0.1,))) for s in steps]
    assert answers == [0, 0, 1, 1, 2, 2, 0, 0]
    with pytest.raises(BoundaryError, match="layer1"):
        StaticPolicy({0: "layer"}).bind(["layer1", "layer2"])
    with pytest.raises(ValueError, match="negative"):
        StaticPolicy({-1: None})


def test_policies_go_by_name_or_by_their_methods() -> None:
    config = ControllerConfig(evaluate_every=1)
    assert isinstance(make_policy("plasticity", config), PlasticityPolicy)
    with pytest.raises(ValueError, match="window must be at least 2"):
        PlasticityPolicy(window=1)
    with pytest.raises(ValueError, match="budget, plasticity"):
        make_policy("nothing-such", config)
    with pytest.raises(TypeError, match="observe"):
        make_policy(object(), config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="benchmarks/rivals"):
        make_policy("autofreeze", config)


def sp_float64(a: np.ndarray, b: np.ndarray) -> float:
    def similarity(x: np.ndarray) -> np.ndarray:
        q = x.reshape(len(x), -1).astype(np.float64)
        gram = q @ q.T
        return gram / np.linalg.norm(gram, axis=1, keepdims=True)

    return float(((similarity(a) - similarity(b)) ** 2).sum() / len(a) ** 2)


@pytest.mark.parametrize("shape", [(2, 3), (8, 4, 5, 5), (32, 7, 16), (5, 1)])
def test_sp_loss_equals_a_float64_numpy_version(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=shape), rng.normal(size=shape)
    ours = sp_loss(torch.tensor(a), torch.tensor(b)).item()
    assert ours == pytest.approx(sp_float64(a, b), rel=2e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [(((4, 3), (5, 3)), "batch sizes"), (((1, 3), (1, 3)), "at least 2"), (((), ()), "batch")],
)
def test_sp_loss_refuses_what_has_no_pairs(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sp_loss(torch.randn(shapes[0]), torch.randn(shapes[1]))


# The bootstrapping stage: where it looks, and what ends it.


def test_a_loss_that_has_not_begun_to_fall_is_not_settled() -> None:
    stage = Bootstrap()
    assert not any(stage.observe(x) for x in [2.30, 2.31, 2.29, 2.30, 2.30, math.nan])
    answers = [stage.observe(x) for x in [1.5, 1.2, 1.1, 1.05, 1.04]]
    assert answers[-1]
    assert not answers[0]
    assert all(stage.observe(9.0) for _ in range(9))  # over for good
    stage = Bootstrap(fall=None)
    assert not any(stage.observe(math.nan) for _ in range(9))


def test_a_group_without_a_rate_has_no_drop() -> None:
    rule = TenfoldDrop()
    rule.should_unfreeze(1, (0.1, 0.0), 0)
    assert not rule.should_unfreeze(2, (0.05, 0.0), 1)
    assert rule.should_unfreeze(3, (0.01, 0.5), 1)
