"""The frozen prefix stays in inference mode, and comes back as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch
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


def test_release_restores_a_module_that_was_in_inference_mode_already():
    model = make_model()
    model[0][2].eval()
    with FrozenPrefix([model[0]]):
        pass
    assert modes(model) == [True, True, True, True, False, True, True]


def test_overlapping_holders_keep_the_module_until_the_last_lets_go():
    model = make_model()
    first, second = FrozenPrefix([model[0]]), FrozenPrefix([model[0][1]])
    first.release()
    model.train()
    assert not model[0][1].training
    assert model[0][0].training
    second.release()
    assert model[0][1].training


def test_extend_twice_holds_once():
    model = make_model()
    prefix = FrozenPrefix([model[0]])
    prefix.extend([model[0], model[1]])
    assert len(prefix) == 5
    assert model[1] in prefix
    prefix.release()
    assert modes(model) == [True] * 7


def copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [copy.deepcopy(model), torch.load(buffer, weights_only=False)]


@pytest.mark.parametrize("which", [0, 1], ids=["deepcopy", "pickle"])
def test_a_copy_is_frozen_by_itself_and_thaws_by_itself(which):
    model = make_model()
    prefix = FrozenPrefix([model[0]])
    twin = copies(model)[which]
    twin.train()
    assert modes(twin) == modes(model)
    twin.eval()
    model.train()
    FrozenPrefix.thaw(twin)
    twin.train()
    assert modes(twin) == [True] * 7
    assert modes(model) == [True, False, False, False, False, True, True]
    prefix.release()
    assert modes(model) == [True] * 7


def test_a_child_added_after_the_freeze_stays_in_inference_mode():
    model = make_model()
    prefix = FrozenPrefix([model[0]])
    model[0].append(nn.Dropout())
    model.train()
    assert not model[0][-1].training
    prefix.release()


def test_train_refuses_what_is_not_a_mode():
    model = make_model()
    FrozenPrefix([model])
    with pytest.raises(ValueError, match="boolean"):
        model.train("yes")
