"""Bad input gets an error that names what, where, and what to do."""

from __future__ import annotations

import pytest
import torch

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader, StoreError
from tests.helpers.nets import Images, freeze, make_net, sgd, train_steps


def test_an_unknown_boundary_is_named_with_near_matches(tmp_path):
    with pytest.raises(BoundaryError, match=r"no module named 'layr1'.*'layer1'"):
        ActivationCache(make_net(), tmp_path, boundary="layr1")


def test_a_trainable_boundary_is_named(tmp_path):
    with pytest.raises(BoundaryError, match=r"'layer1\.0\.weight'.*trainable.*requires_grad_"):
        ActivationCache(make_net(), tmp_path, boundary="layer1")


def test_a_trainable_parameter_before_the_boundary_is_named(tmp_path):
    model = make_net()
    freeze(model, "layer1")
    model.stem[0].bias.requires_grad_(True)
    with ActivationCache(model, tmp_path, "layer1", gate="always") as cache:
        loader = EgeriaLoader(Images(), 8, cache=cache, reuse=None)
        with pytest.raises(BoundaryError, match=r"'stem\.0\.bias'.*trainable"):
            train_steps(model, loader, sgd(model))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": "-5GB"}, "not a size"),
        ({"limit": "many"}, "not a size"),
        ({"codec": "gzip"}, "codec"),
        ({"ring_batches": 0}, "ring_batches must be at least 1, got 0"),
        ({"audit_rate": 1.5}, r"audit_rate must be in \[0, 1\], got 1.5"),
        ({"gate": "perhaps"}, "gate must be 'auto', 'always' or 'never', got 'perhaps'"),
    ],
)
def test_arguments_out_of_range_are_value_errors(tmp_path, kwargs, match):
    with pytest.raises(ValueError, match=match):
        ActivationCache(make_net(), tmp_path, **kwargs)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "cache").write_text("mine")
    with pytest.raises(StoreError, match="cache"):
        ActivationCache(make_net(), tmp_path / "cache")
    assert (tmp_path / "cache").read_text() == "mine"


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match="cache"):
        ActivationCache(make_net(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


class Unsized:
    def __getitem__(self, index):
        return torch.zeros(3)


def test_a_dataset_without_length_is_refused(tmp_path):
    with (
        ActivationCache(make_net(), tmp_path) as cache,
        pytest.raises(TypeError, match=r"needs a dataset with a length.*Unsized has no __len__"),
    ):
        EgeriaLoader(Unsized(), cache=cache, reuse=None)


def test_a_failed_construction_leaves_the_model_as_it_was(tmp_path):
    model = make_net()
    before = set(vars(model))
    with pytest.raises(BoundaryError):
        ActivationCache(model, tmp_path, boundary="nothing")
    assert set(vars(model)) == before
