"""Models inside wrappers: the cache takes the wrapper and its names, or the model and its own."""

import pytest
import torch

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from tests.cache.test_auto import data, frozen_blocks, train


def test_a_compiled_block_answers_to_both_of_its_names(directory):
    model = frozen_blocks()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    expected = train(frozen_blocks(), EgeriaLoader(data(), batch_size=8), 3)
    with ActivationCache(model, directory, "blocks.1._orig_mod", gate="always") as cache:
        cache.set_boundary("_orig_mod.blocks.1")
        loader = EgeriaLoader(data(), batch_size=8, cache=cache)
        assert train(model, loader, 3, lambda epoch: cache.flush()) == pytest.approx(
            expected, abs=1e-6
        )
        assert cache.stats().hits == 64


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("how", ["beside", "in place", "fullgraph", "late", "a function"])
def test_a_model_compiled_whole_beside_its_cache_trains_on_with_one_warning(directory, caplog, how):
    torch._dynamo.reset()
    num_before = 2 if how == "late" else 0
    expected = train(frozen_blocks(), EgeriaLoader(data(), batch_size=8), num_before + 2)
    model = frozen_blocks()
    with ActivationCache(model, directory, "blocks.1", gate="always") as cache:
        loader = EgeriaLoader(data(), batch_size=8, cache=cache)
        ours = train(model, loader, num_before, lambda epoch: cache.flush())
        hits, compiled = cache.stats().hits, model
        if how == "in place":
            model.compile(backend="aot_eager")
        elif how == "a function":
            compiled = OneFunction(model)
        else:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=how == "fullgraph")
        ours += train(compiled, loader, 2, lambda epoch: cache.flush())
        assert cache.stats().hits == hits
        assert "compile its blocks instead" in cache.stats().why_not.lower()
    assert ours == pytest.approx(expected, abs=1e-6)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len([record for record in warned if record.name == "egeria"]) == 1
    torch._dynamo.reset()


class OneFunction(torch.nn.Module):
    """The model is called by a compiled function."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.call = torch.compile(lambda x: self.model(x), backend="aot_eager")

    def forward(self, x):
        return self.call(x)


def test_a_name_that_no_wrapper_explains_is_refused(directory):
    with pytest.raises(BoundaryError, match=r"blocks\.9"):
        ActivationCache(frozen_blocks(), directory, "module.blocks.9")
