"""Every block of Python in README and docs/*.md runs as it stands there.

Of a diff both sides are run, in the surroundings that its reader is supposed to have: the losses
are the same, and what was stored is served.
"""

import functools

import pytest
import torch
import torch.distributed as dist

import egeria_cache
from egeria_cache import ActivationCache
from tests.docs.found import LANGUAGES, blocks, sides
from tests.docs.surroundings import AROUND, EXCERPTS

CODE = {block.key: block for block in blocks() if block.is_code}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*tensorboardX:UserWarning", "ignore:.*does not have many workers",
    "ignore:.*in eval mode at the start of training", "ignore:'set_vital' is deprecated",
    "ignore:.*number of training batches", "ignore::DeprecationWarning",
    "ignore::FutureWarning:transformers.*", "ignore::UserWarning:peft.*",
    "ignore:.*LeafSpec:FutureWarning",
)  # fmt: skip


def run(key, side):
    torch.manual_seed(0)
    space = {"__name__": "document"}
    exec(compile(AROUND[key].code(side), "_".join(map(str, key)), "exec"), space)
    return space


@pytest.fixture
def made(monkeypatch):
    """The caches that a block makes. Its steps are too short to pay, and the gate would say so."""
    caches = []

    def make(*args, **kwargs):
        caches.append(ActivationCache(*args, **{"gate": "always", **kwargs}))
        return caches[-1]

    monkeypatch.setattr(egeria_cache, "ActivationCache", functools.wraps(ActivationCache)(make))
    yield caches
    for cache in caches:
        cache.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_block_says_its_language():
    unknown = [block.key for block in blocks() if block.language not in LANGUAGES]
    assert not unknown, f"not one of {sorted(LANGUAGES)}"


def test_every_block_of_python_is_run_or_an_excerpt():
    assert {*AROUND} | {*EXCERPTS} == {*CODE}
    assert not {*AROUND} & {*EXCERPTS}


@pytest.mark.cases(len(AROUND))
@pytest.mark.parametrize("key", AROUND, ids=lambda key: " ".join(map(str, key)))
def test_a_block_runs_as_it_stands(key, tmp_path, monkeypatch, made):
    around = AROUND[key]
    for module in around.needs:
        pytest.importorskip(module)
    losses = []
    for number, side in enumerate(sides(CODE[key])):
        if number == 0 and not around.plain:
            continue
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        losses.append(run(key, side)["losses"])
    if around.plain:
        assert len(losses[0]) > 0
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    if around.served:
        assert made[-1].stats().hits > 0


@pytest.mark.parametrize("key", EXCERPTS, ids=lambda key: " ".join(map(str, key)))
def test_an_excerpt_is_python(key):
    for side in sides(CODE[key]):
        compile(side, "_".join(map(str, key)), "exec")
