"""Bad input gets an error that names what, where, and what to do."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader, FrozenFront, StoreError
from egeria_core import ControllerConfig, FreezeController
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
        ({"gate": "alway"}, "got 'alway'; did you mean 'always'"),
    ],
)
def test_arguments_out_of_range_are_value_errors(tmp_path, kwargs, match):
    with pytest.raises(ValueError, match=match):
        ActivationCache(make_net(), tmp_path, **kwargs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: ActivationCache(model, "runs", bondary="auto"), "'bondary'.*'boundary'"),
        (lambda model: ActivationCache(model, "runs", 1), "boundary is the name of .* got int 1"),
        (lambda model: ActivationCache(model, "runs", limit=None), "the size limit is bytes"),
        (
            lambda model: ActivationCache(model, "runs", audit_rate="all"),
            "audit_rate must be a num",
        ),
        (lambda model: ActivationCache("runs", model), "takes the model first, then a directory"),
        (lambda model: EgeriaLoader([1], cache="runs"), "cache is an ActivationCache.* got str"),
        (lambda model: EgeriaLoader([1], cache=model), "cache is an ActivationCache.* got Net"),
        (lambda model: EgeriaLoader([1], augmentation_variants=1.5), "whole number, got 1.5"),
        (lambda model: EgeriaLoader([1], reuse="ever"), "reuse, .* whole number, got 'ever'"),
        (
            lambda model: EgeriaLoader([1], bach_size=3),
            "EgeriaLoader has no option 'bach_size'.*'batch_size'",
        ),
        (lambda model: FrozenFront([model], codek="raw"), "FrozenFront has no .*'codec'"),
        (
            lambda model: FreezeController(model, sgd(model), total_stepps=3),
            "FreezeController has no option 'total_stepps'; did you mean 'total_steps'",
        ),
    ],
)
@pytest.mark.cases(12)
def test_arguments_of_another_kind_are_told_by_name(tmp_path, monkeypatch, make, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=match):
        make(make_net())


def test_options_that_are_gone_do_nothing_for_one_release(tmp_path):
    with pytest.warns(FutureWarning, match="verify= does nothing any more: every read"):
        cache = ActivationCache(make_net(), tmp_path, verify="always")
    with cache, pytest.warns(FutureWarning, match="EgeriaLoader: ragged= does nothing any more"):
        EgeriaLoader([1], cache=cache, ragged={"input_ids": 0})
    model = make_net()
    with pytest.warns(FutureWarning, match="FreezeController: probe_rows= does nothing any more"):
        FreezeController(model, sgd(model), total_steps=10, probe_rows=8).close()


def test_options_of_the_controller_are_those_of_its_configuration():
    told = inspect.signature(FreezeController).parameters
    for field in dataclasses.fields(ControllerConfig):
        assert told[field.name].default == field.default
    cache = inspect.signature(ActivationCache).parameters
    for name, option in inspect.signature(FrozenFront).parameters.items():
        if name in cache and name not in ("directory", "gate"):
            assert option.default == cache[name].default


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
