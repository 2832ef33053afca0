"""Accelerate's loop, as its users write it, against the same loop with a DataLoader."""

import logging

import pytest
import torch

pytest.importorskip("accelerate")
import accelerate
from accelerate import DataLoaderConfiguration

from egeria_cache import EgeriaLoader
from tests.helpers.accelerated import in_processes, one_epoch, train, train_as
from tests.loader.test_loader import Augmented

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
CONFIGS = {
    "as it is": {},
    "seedable": {"use_seedable_sampler": True, "data_seed": 3},
    "split": {"split_batches": True},
    "uneven": {"even_batches": False},
    "stateful": {"use_stateful_dataloader": True},
    "stateful, seedable": {
        "use_stateful_dataloader": True, "use_seedable_sampler": True, "data_seed": 3,
    },
}  # fmt: skip


def both(directory, **kwargs):
    return train(directory, **kwargs), train(None, **kwargs)


def assert_alike(ours, plain):
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-6)
    assert ours.gathered == plain.gathered
    for name, value in plain.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_prepared_loader_serves(directory, config):
    ours, plain = both(directory, dataloader_config=DataLoaderConfiguration(**config))
    assert_alike(ours, plain)
    assert ours.hits >= 2 * 42
    assert ours.why_not is None


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True},
        {"drop_last": True},
        {"generator": True},
        {"shuffle": False},
    ],
    ids=str,
)
def test_a_loader_keeps_its_options(directory, options):
    def with_generator():
        return options | (
            {"generator": torch.Generator().manual_seed(4)} if "generator" in options else {}
        )

    ours = train(directory, loader_kwargs=with_generator())
    plain = train(None, loader_kwargs=with_generator())
    assert_alike(ours, plain)
    assert ours.hits > 0


@pytest.mark.parametrize(
    "kwargs", [{"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}]
)
def test_steps_are_those_without_a_cache(directory, kwargs):
    ours, plain = both(directory, **kwargs)
    assert ours.hits > 0
    assert ours.losses == pytest.approx(
        plain.losses, rel=1e-2 if "mixed_precision" in kwargs else 1e-5
    )


@pytest.mark.parametrize("keep", [True, False])
def test_an_unwrapped_model_keeps_or_loses_the_wrapper_and_trains_on(directory, keep):
    def unwrapped(accelerator, model, optimizer, loader):
        one_epoch(accelerator, model, optimizer, loader)
        accelerator.unwrap_model(model, keep_fp32_wrapper=keep)

    ours, plain = both(directory, each=unwrapped, mixed_precision="bf16")
    assert ours.losses == pytest.approx(plain.losses, rel=1e-2)
    assert ours.hits > 0


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("skip", [lambda a, *args: a.skip_first_batches(*args),
                                  lambda a, *args: accelerate.skip_first_batches(*args)],
                         ids=["method", "function"])  # fmt: skip
def test_a_loader_whose_first_batches_are_skipped_serves(directory, skip, seedable):
    seen = {}

    def in_mid_epoch(accelerator, model, optimizer, loader):
        one_epoch(accelerator, model, optimizer, loader)
        rest = skip(accelerator, loader, 2)
        batches = []
        with torch.no_grad():
            for batch in rest:
                model(batch["x"])
                batches.append(batch)
        seen[isinstance(loader, EgeriaLoader)] = [batch["i"].tolist() for batch in batches]
        if isinstance(loader, EgeriaLoader):
            assert isinstance(rest, EgeriaLoader)
            assert sum(batch["x"].batch.entry is not None for batch in batches) >= len(batches) - 1

    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    ours, plain = both(directory, each=in_mid_epoch, dataloader_config=config)
    assert_alike(ours, plain)
    assert len(seen[True]) == 4
    assert seen[True] == seen[False]


@pytest.mark.parametrize("seedable", [False, True])
def test_a_saved_state_is_gone_on_from(directory, tmp_path, seedable):
    """With `use_stateful_dataloader` Accelerate saves and loads what the loader says."""
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=seedable, data_seed=3
    )
    losses = {}

    def saving(accelerator, model, optimizer, loader):
        losses["head"] = one_epoch(accelerator, model, optimizer, loader)
        loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        accelerator.save_state(tmp_path / "state")
        losses["rest"] = one_epoch(accelerator, model, optimizer, batches)

    def loading(accelerator, model, optimizer, loader):
        loader.set_epoch(1)
        accelerator.load_state(tmp_path / "state")
        losses["resumed"] = one_epoch(accelerator, model, optimizer, loader)

    train(directory, epochs=0, each=saving, dataloader_config=config)
    ours = train(directory, epochs=0, each=loading, dataloader_config=config)
    assert len(losses["rest"]) == 4
    assert losses["resumed"] == losses["rest"]
    assert ours.hits > 0


def test_dispatched_batches_pass_uncached_and_that_is_said_once(directory, caplog):
    config = DataLoaderConfiguration(dispatch_batches=True)
    with caplog.at_level(logging.WARNING, logger="egeria"):
        ours, plain = both(directory, dataloader_config=config)
    assert_alike(ours, plain)
    assert ours.hits == 0
    assert sum("dispatch_batches" in record.message for record in caplog.records) == 1


def test_other_loaders_are_prepared_as_before(directory):
    def plain_as_well(accelerator, model, optimizer, loader):
        other = torch.utils.data.DataLoader(loader.dataset, 8)
        assert not isinstance(accelerator.prepare(other), EgeriaLoader)
        mine = EgeriaLoader(loader.dataset, 8)
        assert not isinstance(accelerator.prepare(mine), EgeriaLoader)

    train(directory, epochs=0, each=plain_as_well)


PROCESSES = {name: CONFIGS[name] for name in ("as it is", "seedable", "split", "uneven")}


@pytest.mark.long
def test_every_process_serves_its_own_samples(directory):
    for name, ranks in zip(PROCESSES, zip(*in_processes(train_as, 2, str(directory), PROCESSES),
                                          strict=True), strict=True):  # fmt: skip
        for ours, plain in ranks:
            assert ours.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-6), name
            assert ours.gathered == plain.gathered, name
            assert len(plain.gathered) == (0 if name == "uneven" else 42), name
            # An unseeded shuffle gives each process other samples in every epoch.
            assert ours.hits > 0, name
            assert ours.why_not is None, name


def test_a_data_set_is_not_looked_through_again_for_each_rebuilt_loader():
    accelerator = accelerate.Accelerator(cpu=True)
    loader = EgeriaLoader(Augmented(24), 4, seed=5)
    prepared = accelerator.prepare(loader)
    assert prepared.base_dataloader.source is loader.source
    rest = accelerator.skip_first_batches(prepared, 1)
    assert rest.base_dataloader.source is loader.source
