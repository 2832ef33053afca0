from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from egeria_core import sp_loss
from egeria_core.plasticity import linear_slope, moving_average


def sp_float64(a: np.ndarray, b: np.ndarray) -> float:
    def similarity(x: np.ndarray) -> np.ndarray:
        q = x.reshape(len(x), -1).astype(np.float64)
        gram = q @ q.T
        return gram / np.linalg.norm(gram, axis=1, keepdims=True)

    return float(((similarity(a) - similarity(b)) ** 2).sum() / len(a) ** 2)


_X = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("train", "reference", "expected"),
    [
        (torch.eye(2), torch.ones(2, 2), 1 - 1 / 2**0.5),
        (torch.eye(4), torch.ones(4, 4), 0.25),
        (_X, torch.sin(_X), 0.0699664),
    ],
    ids=["identity_2", "identity_4", "sine"],
)
def test_sp_loss_has_the_reference_values(
    train: Tensor, reference: Tensor, expected: float
) -> None:
    assert sp_loss(train, reference).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(2, 3), (8, 4, 5, 5), (32, 7, 16), (5, 1)])
def test_sp_loss_equals_a_float64_numpy_version(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=shape), rng.normal(size=shape)
    ours = sp_loss(torch.tensor(a), torch.tensor(b)).item()
    assert ours == pytest.approx(sp_float64(a, b), rel=2e-5, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    b=st.integers(2, 12), d=st.integers(1, 20), seed=st.integers(0, 10**6), c=st.floats(0.01, 100)
)
def test_sp_loss_ignores_scale_and_feature_order_and_is_bounded(
    b: int, d: int, seed: int, c: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(b, d, generator=g), torch.randn(b, d, generator=g)
    loss = sp_loss(x, y).item()
    assert 0 <= loss <= 4 / b * (1 + 1e-5)
    assert sp_loss(x * c, y[:, torch.randperm(d, generator=g)]).item() == pytest.approx(
        loss, rel=1e-3, abs=1e-6
    )


def test_sp_loss_of_equal_activations_is_zero_and_widths_may_differ() -> None:
    x = torch.randn(4, 6)
    assert sp_loss(x, x.clone()).item() == 0
    assert sp_loss(x, torch.cat([x, torch.zeros(4, 3)], dim=1)).item() == pytest.approx(0, abs=1e-9)


def test_sp_loss_takes_no_gradient_and_any_floating_dtype() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    loss = sp_loss(x, torch.randn(4, 6).to(torch.bfloat16))
    assert not loss.requires_grad
    assert loss.dtype is torch.float32


@pytest.mark.parametrize(
    ("shapes", "message"),
    [(((4, 3), (5, 3)), "batch sizes"), (((1, 3), (1, 3)), "at least 2"), (((), ()), "batch")],
)
def test_sp_loss_refuses_what_has_no_pairs(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sp_loss(torch.randn(shapes[0]), torch.randn(shapes[1]))


def test_moving_average_takes_the_last_window_or_all_there_is() -> None:
    assert moving_average([4.0], 3) == 4.0
    assert moving_average([1.0, 2.0], 3) == 1.5
    assert moving_average([100.0, 1.0, 2.0, 3.0], 3) == 2.0
    with pytest.raises(ValueError, match="window"):
        moving_average([], 3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_linear_slope_equals_numpys_least_squares(values: list[float]) -> None:
    expected = np.polyfit(np.arange(len(values)), values, 1)[0]
    assert linear_slope(values) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_one_value_has_no_slope() -> None:
    assert linear_slope([5.0]) == 0.0
