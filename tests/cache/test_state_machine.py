"""Random orders of events against a twin that recomputes everything: nothing stale is ever served.

The twin has the same weights, sees the same raw samples, and never uses a cache. After every step
its loss and its weights must be those of the cached model.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.nn import functional as F
from torch.utils.data import Dataset

from egeria_cache import ActivationCache, EgeriaLoader, FrozenPrefix
from egeria_cache.batch.tensor import unwrap
from egeria_cache.prefetch import prefetcher
from tests.helpers.nets import Images, freeze, make_net, sgd
from tests.helpers.runs import kill_writer

ORDER = [None, "stem", "layer1", "layer2"]


class Numbered(Dataset):
    """Images with their own number, so that the twin can look them up."""

    def __init__(self):
        self.images = Images(24, noise=0)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, target = self.images[index]
        return image, target, index


class CachedTraining(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 3), batch_size=st.sampled_from([4, 7]), ring=st.booleans())
    def start(self, seed, batch_size, ring):
        self.needs_ring = prefetcher.needs_ring
        prefetcher.needs_ring = lambda device: ring
        self.directory = Path(tempfile.mkdtemp(prefix="egeria-test-"))
        self.data = Numbered()
        self.batch_size = batch_size
        self.model, self.twin = make_net(seed), make_net(seed)
        self.optimizer, self.twin_optimizer = sgd(self.model), sgd(self.twin)
        self.boundary, self.num_steps = None, 0
        self.hold = FrozenPrefix()
        self.open()

    def open(self):
        self.cache = ActivationCache(self.model, self.directory, self.boundary, gate="always")
        self.loader = EgeriaLoader(
            self.data, self.batch_size, shuffle=True, cache=self.cache, reuse=None
        )
        self.iterator = None

    def train_mode(self):
        self.model.train()
        self.twin.train()

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.train_mode()
            if self.iterator is None:
                self.iterator = iter(self.loader)
            batch = next(self.iterator, None)
            if batch is None:
                self.iterator = None
                continue
            images, _, numbers = batch
            numbers = unwrap(numbers)
            raw = self.data.images.images[numbers]
            targets = self.data.images.targets[numbers]
            losses, self.num_steps = [], self.num_steps + 1
            for model, optimizer, inputs in (
                (self.model, self.optimizer, images),
                (self.twin, self.twin_optimizer, raw),
            ):
                torch.manual_seed(self.num_steps)  # the same dropout for both
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)

    @rule()
    def finish_epoch(self):
        self.step(12)

    @precondition(lambda self: self.boundary != "layer2")
    @rule(ahead=st.integers(1, 3))
    def freeze_forward(self, ahead):
        at = min(ORDER.index(self.boundary) + ahead, len(ORDER) - 1)
        self.move(ORDER[at])

    @precondition(lambda self: self.boundary is not None)
    @rule()
    def unfreeze(self):
        self.move(None)

    @precondition(lambda self: self.boundary in ("layer1", "layer2"))
    @rule()
    def move_back(self):
        self.move("stem")

    def move(self, boundary):
        self.boundary = boundary
        for model in (self.model, self.twin):
            freeze(model, boundary)
        self.hold.release()
        self.hold = FrozenPrefix(
            dict(self.twin.named_children())[name] for name in ORDER[1 : ORDER.index(boundary) + 1]
        )
        self.cache.set_boundary(boundary)

    @precondition(lambda self: self.boundary is not None)
    @rule(how=st.sampled_from(["add", "load_state_dict", "buffer", "data"]))
    def change_a_weight_outside(self, how):
        for model in (self.model, self.twin):
            with torch.no_grad():
                if how == "add":
                    model.stem[0].weight.add_(0.1)
                elif how == "buffer":
                    model.stem[1].running_mean.add_(0.1)
                elif how == "data":
                    model.stem[0].weight.data.mul_(1.1)
                else:
                    state = {k: v.clone() for k, v in model.state_dict().items()}
                    state["stem.0.bias"] += 0.1
                    model.load_state_dict(state)

    @rule()
    def flush(self):
        self.cache.flush()

    @rule()
    def close_and_reopen(self):
        self.cache.close()
        self.open()

    @rule()
    def abandon_the_epoch(self):
        self.iterator = None

    @rule()
    def kill_the_writer(self):
        kill_writer(self.cache)

    @rule()
    def remove_the_directory(self):
        shutil.rmtree(self.directory, ignore_errors=True)

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            prefetcher.needs_ring = self.needs_ring
        super().teardown()


TestCachedTraining = CachedTraining.TestCase
TestCachedTraining.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
