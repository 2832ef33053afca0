"""Loaders in every state of use: nothing leaks, nothing hangs, every batch is right."""

import pytest
import torch
from torch.nn import functional as F

from egeria_cache import ActivationCache, EgeriaLoader
from egeria_cache.batch.tensor import BatchTensor
from tests.helpers.nets import Images, sgd, train_steps
from tests.helpers.runs import both, cached

pytestmark = pytest.mark.usefixtures("way_of_rows")


class Exposed(torch.nn.Module):
    """Returns what crosses the boundary beside its logits, as models with features do."""

    def __init__(self):
        super().__init__()
        self.front, self.head = torch.nn.Linear(6, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        features = self.front(x)
        return features, self.head(features)


def test_what_is_written_to_a_batch_is_written_to_none_that_was_read_with_it(tmp_path):
    torch.manual_seed(0)
    model, data = Exposed(), torch.utils.data.TensorDataset(torch.randn(8, 6))
    model.front.requires_grad_(False)
    with ActivationCache(model, tmp_path, "front", gate="always", audit_rate=0) as cache:
        gradients = []
        for _ in range(3):
            model.head.zero_grad()
            loss = torch.zeros(())
            for number, (x,) in enumerate(EgeriaLoader(data, 2, cache=cache)):
                features, logits = model(x)
                if number % 2:
                    features.zero_()
                else:
                    loss = loss + logits.square().sum()
            loss.backward()
            gradients.append(model.head.weight.grad.clone())
            cache.flush()
        assert cache.stats().hits == 16
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_targets_of_hits_are_plain_tensors_of_the_same_type(tmp_path):
    with cached(tmp_path) as (model, cache):
        loader = EgeriaLoader(Images(noise=0), 8, cache=cache)
        expected = [targets.tolist() for _, targets in loader]
        train_steps(model, loader, sgd(model), on_step=lambda _: cache.flush())
        for (images, targets), values in zip(loader, expected, strict=True):
            assert isinstance(images, BatchTensor)
            assert type(targets) is torch.Tensor
            assert targets.dtype == torch.int64
            assert targets.tolist() == values


class Ragged(Images):
    """Images of two widths, in turn by `period`."""

    def __init__(self, period):
        super().__init__(noise=0)
        self.period = period

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return F.pad(image, (0, 2 * (index // self.period % 2))), target


def pad_to_longest(samples):
    width = max(image.shape[-1] for image, _ in samples)
    images = [F.pad(image, (0, width - image.shape[-1])) for image, _ in samples]
    return torch.stack(images), torch.stack([target for _, target in samples])


def test_batches_of_two_sizes_are_served_from_two_generations(tmp_path):
    served, computed = both(tmp_path, data=Ragged(24), shuffle=False)
    assert served[0] == computed[0]
    assert (served[3].hits, computed[3].hits) == (2 * 48, 0)


@pytest.mark.parametrize("period", [1, 3, 8])
def test_padding_to_the_longest_of_the_batch_is_never_wrong(tmp_path, period, caplog):
    served, computed = both(tmp_path, data=Ragged(period), collate_fn=pad_to_longest)
    torch.testing.assert_close(served[0], computed[0], rtol=1e-5, atol=1e-6)
    assert caplog.text.count("depends on what stands in the padding") == 1
    assert "padded batches are not cached at .layer1." in caplog.text.replace(chr(39), ".")
