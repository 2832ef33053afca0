"""The frozen prefix stays in inference mode, and comes back as it was."""

from __future__ import annotations

import pytest
from torch import nn

from egeria_cache.skip.model.frozen import FrozenPrefix


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)),
        nn.BatchNorm2d(4),
        nn.Dropout(0.5),
    )


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_training_mode_leaves_the_frozen_modules_in_inference_mode():
    model = make_model()
    FrozenPrefix([model[0]])
    assert modes(model) == [True, False, False, False, False, True, True]
    model.train()
    model[0].train()
    model[0][1].train()
    assert modes(model) == [True, False, False, False, False, True, True]


@pytest.mark.parametrize("last_mode", [True, False], ids=["train", "eval"])
def test_release_restores_the_mode_asked_for_meanwhile(last_mode):
    model = make_model()
    prefix = FrozenPrefix([model[0]])
    model.train(last_mode)
    prefix.release()
    assert modes(model) == [last_mode] * 7
    assert not any("train" in module.__dict__ for module in model.modules())
    prefix.release()


def test_overlapping_holders_keep_the_module_until_the_last_lets_go():
    model = make_model()
    first, second = FrozenPrefix([model[0]]), FrozenPrefix([model[0][1]])
    first.release()
    model.train()
    assert not model[0][1].training
    assert model[0][0].training
    second.release()
    assert model[0][1].training


def test_a_child_added_after_the_freeze_stays_in_inference_mode():
    model = make_model()
    prefix = FrozenPrefix([model[0]])
    model[0].append(nn.Dropout())
    model.train()
    assert not model[0][-1].training
    prefix.release()
