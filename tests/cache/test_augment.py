"""Augmentation behind the boundary: drawn in every step, on hits and misses alike."""

import pytest
import torch
from torch import nn

from egeria_cache import ActivationCache, EgeriaError, EgeriaLoader, FeatureAugment
from egeria_cache.augment import Crop, CutMix, Dropout, Flip, Jitter, Mixup, Noise, Translate
from tests.helpers.nets import Images, frozen_net, sgd, train_steps
from tests.helpers.runs import cached

OPERATIONS = [Flip(), Translate(2), Dropout(), Noise(), Jitter(), Mixup(), CutMix()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
@pytest.mark.parametrize("shape", [(6, 4, 8, 8), (6, 8, 8)], ids=["maps", "tokens"])
def test_an_operation_keeps_the_shape_and_is_decided_by_its_generator(operation, shape):
    x = torch.randn(shape)
    one, same, other = (operation(x, torch.Generator().manual_seed(seed)) for seed in (1, 1, 20))
    assert one.shape == x.shape
    assert one.dtype == x.dtype
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, x)


@pytest.mark.parametrize(
    ("shape", "expected"), [((2, 4, 10, 8), (2, 4, 5, 4)), ((2, 10, 8), (2, 5, 8))]
)
def test_a_crop_keeps_a_window(shape, expected):
    assert Crop(0.5)(torch.randn(shape)).shape == expected


@pytest.mark.parametrize("mix", [Mixup(0.4), CutMix()], ids=repr)
def test_the_loss_of_mixed_samples_is_that_of_both(mix):
    x, target = torch.randn(5, 3, 6, 6), torch.arange(5)
    criterion, output = nn.CrossEntropyLoss(), torch.randn(5, 5)
    mix(x)
    order, weight = mix.order, mix.weight
    assert 0 <= weight <= 1
    expected = weight * criterion(output, target) + (1 - weight) * criterion(output, target[order])
    torch.testing.assert_close(mix.loss(criterion, output, target), expected)
    assert mix.loss(criterion, output, target) == criterion(output, target), "drawn once, used once"


def run(directory, gate, *operations):
    model = frozen_net()
    FeatureAugment(*operations).before(model.layer2)
    with ActivationCache(model, directory, "layer1", gate=gate, audit_rate=0) as cache:
        loader = EgeriaLoader(Images(noise=0), 8, shuffle=True, cache=cache)
        losses, _ = train_steps(model, loader, sgd(model), 3, lambda step: cache.flush())
        assert cache.stats().why_not is None
        return losses, cache.stats().hits, model


def test_features_are_augmented_anew_in_every_step_whether_or_not_they_are_served(tmp_path):
    plain = run(tmp_path / "plain", "always")
    served = run(tmp_path / "served", "always", Flip(), Noise(0.1))
    computed = run(tmp_path / "computed", "never", Flip(), Noise(0.1))
    assert served[0] == computed[0]
    assert served[0] != plain[0]
    assert (served[1], computed[1]) == (2 * 48, 0)
    model, x = served[2].eval(), torch.randn(2, 1, 10, 10)
    assert torch.equal(model(x), model(x)), "nothing is drawn in evaluation"


def test_what_is_no_batch_of_features_is_told():
    augment = FeatureAugment(Flip())
    with pytest.raises(TypeError, match=r"maps \(B, C, H, W\) or tokens"):
        augment(torch.randn(3, 4))
    assert "Flip(p=0.5)" in repr(augment)
    assert augment.eval()(torch.ones(2, 2)).shape == (2, 2)


def test_what_commutes_with_the_front_is_measured(tmp_path):
    with cached(tmp_path, gate="auto") as (model, cache):
        loader = EgeriaLoader(Images(noise=0), 8, cache=cache)
        modes, seen = [module.training for module in model.modules()], set()
        model.stem.register_forward_pre_hook(lambda *_: seen.add(model.training))
        shift, flip = (cache.commutes(loader, one) for one in (Translate(1), Flip()))
        assert cache.commutes(loader, lambda x, generator: x) == 0
        assert shift < flip < 2, "convolutions move with their input; they are not mirrored"
        # What is beside the front keeps its running means.
        assert ([module.training for module in model.modules()], seen) == (modes, {False})
        with pytest.raises(EgeriaError, match="features of"):
            cache.commutes(loader, Crop(0.5), Flip())
        cache.set_boundary(None)
        with pytest.raises(EgeriaError, match="nothing is frozen"):
            cache.commutes(loader, Flip())
