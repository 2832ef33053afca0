"""With the cache equals without the cache: losses, gradients, weights, in every way to use it."""

from __future__ import annotations

import pytest
import torch
from digits import ResNet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.samples.fingerprint import NUM_AGAIN
from tests.helpers.nets import Images, freeze, sgd, train_steps
from tests.helpers.runs import assert_same, both, cached, run
from tests.helpers.steps import take_step
from tests.hostile.loops import one_ahead


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("variants", [1, 2])
@pytest.mark.parametrize("boundary", ["stem", "layer1", "layer2"])
def test_a_frozen_run_is_the_same_to_the_bit(tmp_path, boundary, variants, workers):
    if workers and boundary != "layer1":
        pytest.skip("one boundary is enough with workers")
    settings = {"augmentation_variants": variants, "num_workers": workers}
    cached, computed = both(tmp_path, boundary=boundary, epochs=4, **settings)
    assert_same(cached, computed)
    assert cached[3].hits == 48 * (4 - variants)
    assert cached[3].misses == 48 * variants
    assert computed[3].hits == 0


def test_a_full_hit_epoch_reads_the_dataset_for_its_checks_alone(tmp_path):
    one = run(tmp_path / "a", gate="always", epochs=2)
    more = run(tmp_path / "b", gate="always", epochs=5)
    audited = more[3].audited - one[3].audited
    assert audited <= 3 * 2  # of 48 samples an epoch
    # Two are read again at either end of a pass, to see that it is the same data set.
    assert more[4].num_loaded - one[4].num_loaded <= audited + 3 * 2 * 2


def test_who_trains_and_evaluates_over_one_loader_is_served_in_both(tmp_path):
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Images(noise=0), 8, cache=cache)
        for number in range(6):
            for images, _ in loader:
                model.train(number % 2 == 0)(images)
            cache.flush()
        # The first evaluation proves its own cut, and what was to be read for it is a miss.
        assert (cache.stats().hits, cache.stats().misses) == (4 * 48, 2 * 48)


def test_what_was_loaded_before_the_data_changed_is_not_stored_as_of_the_new(tmp_path):
    runs = []
    for gate in ("always", "never"):
        data = Images(noise=0)
        change = {3: lambda images=data.images: images.mul_(2)}
        settings = {
            "epochs": 4, "data": data, "wrap": OneAhead,
            "each_step": lambda step, _, change=change: change.get(step, int)(),
        }  # fmt: skip
        runs.append(run(tmp_path / gate, gate=gate, **settings))
    assert_same(*runs)
    assert runs[0][3].hits >= 2 * 48


@pytest.mark.parametrize(
    "moves",
    [
        {4: "layer2"},
        {9: "layer2", 14: None},
        {2: None, 9: "stem", 13: "layer2", 20: None, 21: "layer1"},
        {7: None, 8: "layer1", 9: None, 10: "layer1"},
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_moves_while_batches_are_in_flight_change_nothing(tmp_path, moves, workers):
    cached, computed = both(tmp_path, moves=moves, epochs=5, num_workers=workers)
    assert_same(cached, computed)
    assert cached[3].hits > 0


def test_a_boundary_that_moves_back_lets_go_of_what_lies_beyond(tmp_path):
    with cached(tmp_path, "layer2") as (model, cache):
        loader = EgeriaLoader(Images(16), 8, cache=cache)
        train_steps(model, loader, sgd(model))
        (stored,) = cache.api.views.of(loader.source.key)
        freeze(model, "layer1")
        cache.set_boundary("layer1")
        model.train()
        assert model.layer2[0].training
        assert not model.layer1[1].training
        assert not stored.alive


def test_a_front_that_was_written_to_lets_go_of_what_was_stored(tmp_path):
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Images(16), 8, cache=cache)
        train_steps(model, loader, sgd(model))
        (stored,) = cache.api.views.of(loader.source.key)
        model.stem[0].weight.data.mul_(2)
        train_steps(model, loader, sgd(model))
        assert not stored.alive


class OneAhead:
    """What Accelerate's loader does: the next batch is fetched before this one is given out."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return one_ahead(self.loader)


@pytest.mark.parametrize("moves", [None, {9: "layer2", 14: None}])
def test_a_wrapper_that_fetches_one_batch_ahead_shifts_nothing(tmp_path, moves):
    cached, computed = both(tmp_path, wrap=OneAhead, moves=moves, epochs=4)
    assert_same(cached, computed)
    assert cached[3].hits > 0


def test_after_a_forward_move_the_old_activations_are_the_way_in(tmp_path):
    result = run(tmp_path / "a", gate="always", moves={12: "layer2"}, epochs=5)
    # The second epoch hits layer1; the third enters at layer1 and fills layer2: nothing is loaded.
    # The batch on which the new cut was proved is computed.
    assert (result[3].misses, result[3].hits) == (48 + 8, 48 * 4 - 8)
    # The fingerprint looks at 32, and again at some where a pass begins and where it ends.
    assert result[4].num_loaded <= 48 + 32 + 5 * 2 * NUM_AGAIN + result[3].audited


def test_a_boundary_that_moves_at_a_mixed_batch_is_followed(tmp_path):
    """Half of the samples are stored when the boundary moves on; the next batches are mixed."""
    moves = {3: "layer1", 8: "layer2"}
    cached, computed = both(tmp_path, moves=moves, epochs=4, boundary="stem")
    assert cached[3].partial_batches > 0
    assert cached[3].why_not is None
    torch.testing.assert_close(cached[0], computed[0], rtol=1e-5, atol=1e-6)


# Two hundred training steps, through loader, store and skip, end where the computed run ends.

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 40, 8, 40
LARGEST_BF16_DIFFERENCE = 1e-3
"""Of a loss, relative: rows that are merged with computed ones may round once more. 0 was seen."""


class Samples(Dataset):
    """Fixed inputs with noise from torch's global generator, and targets."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, *shape, generator=generator)
        self.targets = torch.randint(10, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        return x + 0.1 * torch.randn_like(x), self.targets[index]


class Transformer(nn.Module):
    """Three encoder layers with dropout, on sequences of vectors; a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def resnet() -> tuple[nn.Module, str, tuple[int, ...]]:
    model = ResNet(num_blocks=1, width=4)
    for module in (model.conv1, model.bn1, model.layer1):
        module.requires_grad_(False)
    return model, "layer1", (1, 8, 8)


def transformer() -> tuple[nn.Module, str, tuple[int, ...]]:
    model = Transformer()
    model.blocks[:2].requires_grad_(False)
    return model, "blocks.1", (6, 16)


def losses_of(make, directory, gate: str, dtype: torch.dtype) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model, boundary, shape = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = []
    with ActivationCache(model, directory, boundary, gate=gate, audit_rate=0.0) as cache:
        loader = EgeriaLoader(
            Samples(shape), batch_size=BATCH_SIZE, shuffle=True, cache=cache, reuse=None,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        for _ in range(NUM_EPOCHS):
            model.train()
            for inputs, targets in loader:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    loss = F.cross_entropy(model(inputs), targets)
                losses.append(take_step(loss, optimizer).item())
            cache.flush()
        return losses, cache.stats().hits


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [resnet, transformer])
def test_two_hundred_steps_end_where_the_computed_run_ends(make, dtype, tmp_path):
    computed, no_hits = losses_of(make, tmp_path / "computed", "never", dtype)
    cached, hits = losses_of(make, tmp_path / "cached", "always", dtype)
    assert len(computed) == len(cached) == 200
    assert no_hits == 0
    assert hits >= NUM_SAMPLES * (NUM_EPOCHS - 1)
    if dtype == torch.float32:
        assert cached == computed
    else:
        for ours, theirs in zip(cached, computed, strict=True):
            assert abs(ours - theirs) <= LARGEST_BF16_DIFFERENCE * abs(theirs)
