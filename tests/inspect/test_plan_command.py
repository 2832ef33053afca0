"""`cache-inspect plan`: what it measures, what the engine refuses, and what it says of mistakes."""

import itertools
import json

import pytest
import torch
from torch.utils.data import DataLoader

import egeria_cache.inspect.plan as forecast_module
from egeria_cache.inspect.cli import main
from egeria_cache.inspect.plan import Forecast, Prospect, forecast
from egeria_cache.skip.prove.cut_points import candidates
from tests.helpers import plan_zoo

ZOO = plan_zoo.__name__
CNN = ["relu", "layer1.0", "pool", "layer2.0", "layer2.1"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(forecast_module, "ENOUGH_S", 0.0)
    monkeypatch.setattr(forecast_module, "NUM_SAMPLES", 8)


def ask(capsys, *argv):
    code = main(["plan", *map(str, argv)])
    return code, capsys.readouterr()


def ask_json(capsys, *argv):
    code, shown = ask(capsys, *argv, "--json")
    assert code == 0, shown.err
    return json.loads(shown.out)


def test_candidates_are_the_blocks_in_forward_order_cut_where_least_crosses():
    model = plan_zoo.cnn_model()
    found = candidates(model, lambda: model(torch.randn(2, 1, 8, 8)))
    assert [one.boundary for one in found] == CNN
    frozen = [set(one.parameters) for one in found]
    assert frozen[0] == {"conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"}
    assert all(one <= other for one, other in itertools.pairwise(frozen))
    assert not any(name.startswith("head") for name in frozen[-1])


def test_a_parameter_of_the_model_itself_freezes_with_what_is_made_from_it():
    model = plan_zoo.transformer_model()
    found = candidates(model, lambda: model(torch.zeros(2, 6, dtype=torch.long)))
    assert [one.boundary for one in found] == ["embed", "blocks.0", "blocks.1", "blocks.2"]
    assert ["token" in one.parameters for one in found] == [False, True, True, True]


def test_a_cnn_is_measured_at_every_boundary(capsys):
    report = ask_json(capsys, f"{ZOO}:cnn")
    prospects = report["prospects"]
    assert [one["boundary"] for one in prospects] == CNN
    assert all(one["refused"] is None for one in prospects)
    for one in prospects:
        assert one["set_bytes"] == pytest.approx(one["stored_bytes"] * 40)
        figures = ("step_s", "served_step_s", "stored_bytes")
        assert all(one[figure] > 0 for figure in figures)
        assert one["step_skipped"] == pytest.approx(1 - one["served_step_s"] / one["step_s"])
    assert report["num_samples"] == 40
    assert report["num_measured"] == 8


@pytest.mark.long
def test_boundaries_of_ones_own(capsys):
    report = ask_json(capsys, f"{ZOO}:transformer", "--boundaries", r"blocks\.[12]|head")
    assert [one["boundary"] for one in report["prospects"]] == ["blocks.1", "blocks.2"]


def test_data_that_differs_at_every_look_is_refused_as_in_training(capsys):
    report = ask_json(capsys, f"{ZOO}:restless", "--boundaries", "relu")
    assert "not the same when it is loaded again" in report["prospects"][0]["refused"]


def test_the_model_and_the_disk_are_left_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = plan_zoo.cnn_model()
    model.conv1.weight.requires_grad_(False)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    found = forecast(
        model, DataLoader(plan_zoo.Images(), 4), plan_zoo.classified, boundaries="layer1|layer2"
    )
    assert [one.refused for one in found.prospects] == [None, None]
    assert not list(tmp_path.iterdir())
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name])
        assert value.grad is None
        assert value.requires_grad == (name != "conv1.weight")
    assert "forward" not in model.__dict__
    assert all(module.training for module in model.modules())


def outlook(*prospects):
    return Forecast(
        model="M", device="cpu", batch_size=1, num_measured=1, num_samples=100, prospects=prospects
    )


def prospect(boundary, served, *, stored=1000.0):
    return Prospect(
        boundary=boundary, stored_bytes=stored, step_s=2e-3, served_step_s=served * 2e-3,
        step_error=0.02,
    )  # fmt: skip


def test_the_shortest_served_step_is_recommended_and_of_equals_the_smaller_one():
    found = outlook(prospect("a", 0.8), prospect("b", 0.41, stored=500.0), prospect("c", 0.4))
    assert found.recommended().boundary == "b"
    assert outlook(prospect("a", 0.8), prospect("b", 0.3)).recommended().boundary == "b"
    assert outlook(prospect("a", 1.2), prospect("b", 1.1)).recommended() is None
    refused = Prospect(boundary="c", refused="no")
    assert outlook(prospect("a", 1.2), refused).recommended() is None
    assert outlook(prospect("a", 0.99), refused).recommended().boundary == "a"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([ZOO], [f"'{ZOO}'", "package.module:callable"]),
        ([f"{ZOO}:"], ["package.module:callable"]),
        (["no_such_module:cnn"], ["No module named 'no_such_module'", "looked for in"]),
        ([f"{ZOO}:cn"], ["has no attribute 'cn'"]),
        ([f"{ZOO}:number"], ["int", "callable"]),
        ([f"{ZOO}:fails"], ["KeyError: 'the weights'", "plan_zoo.py, line"]),
        ([f"{ZOO}:Images"], ["returned a Images", "(model, loader, step)"]),
        ([f"{ZOO}:streamed"], ["Stream", "map-style"]),
        ([f"{ZOO}:mistaken"], ["step(model, batch) failed", "plan_zoo.py, line"]),
        ([f"{ZOO}:silent"], ["returned a NoneType", "must return the loss"]),
        ([f"{ZOO}:cnn", "--boundaries", "nothing"], ["'nothing'", "layer1.0"]),
        ([f"{ZOO}:cnn", "--boundaries", "("], ["regular expression"]),
        ([f"{ZOO}:cnn", "--samples", "8"], ["unrecognized arguments: --samples"]),
        ([], ["FACTORY"]),
    ],
)  # fmt: skip
def test_mistakes_exit_2_and_say_what_to_do(capsys, argv, words):
    code, shown = ask(capsys, *argv)
    assert code == 2
    assert all(word in shown.err for word in words), shown.err
