"""LoRA adapters behind, in and throughout the frozen front: the losses of plain training, or a
refusal that names the adapter."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from tests.helpers.steps import take_step

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers.*", "ignore::DeprecationWarning",
    "ignore:.*already merged", "ignore::UserWarning:peft.*", "ignore::UserWarning:contextlib",
    "ignore:None of the inputs have requires_grad",  # reentrant regions under the proof's replays
)  # fmt: skip
BOUNDARY = "base_model.model.model.layers.1"
BATCHES = 6


class Texts(Dataset):
    def __init__(self, n=4 * BATCHES):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 60, (n, 10), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def lora(layers, **kwargs):
    # Not zero at the start: switching an adapter on or off is to change something.
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return LoraConfig(layers_to_transform=layers, **(options | kwargs))


def make(layers=(2, 3), *, checkpointing=None, prior=False):
    """Return a tiny Llama with LoRA in some layers and a trained head.

    `prior` is another adapter, frozen, in the front.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    wrapped = get_peft_model(model, lora(list(layers) if layers else None))
    if prior:
        wrapped.add_adapter("prior", lora([0, 1]))
        activate(wrapped, "default", "prior")
    model.lm_head.weight.requires_grad_(True)
    return wrapped


def activate(model, *names):
    model.base_model.set_adapter(list(names))
    freeze_front(model)


def freeze_front(model):
    for name, parameter in model.named_parameters():
        if ".layers.0." in name or ".layers.1." in name:
            parameter.requires_grad_(False).grad = None


def train(model, loader, *, epochs=3, events=None, flush=lambda: None):
    """Train as anybody would; `events` maps a step to what is done to the model before it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, 0.1), []
    model.train()
    for _ in range(epochs):
        for batch in loader:
            (events or {}).get(len(losses), lambda model: None)(model)
            loss = take_step(model(**batch).loss, optimizer)
            losses.append(loss.item())
        flush()
    return losses


def both(directory, boundary=BOUNDARY, *, epochs=3, events=None, **kwargs):
    """Return the losses with and without a cache, and the cache's figures."""
    plain = train(make(**kwargs), DataLoader(Texts(), 4), epochs=epochs, events=events)
    model = make(**kwargs)
    with ActivationCache(model, directory, boundary, gate="always") as cache:
        loader = EgeriaLoader(Texts(), 4, cache=cache)
        losses = train(model, loader, epochs=epochs, events=events, flush=cache.flush)
        return losses, plain, cache.stats()


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("boundary", [BOUNDARY, "auto"])
def test_adapters_in_the_last_layers_are_trained_behind_the_cut(tmp_path, checkpointing, boundary):
    """And the front before the first one is found by itself."""
    losses, plain, stats = both(tmp_path, boundary, checkpointing=checkpointing)
    assert losses == plain
    assert len(set(losses)) == len(losses)  # it trains
    assert (stats.hits, stats.boundary) == (2 * 4 * BATCHES, BOUNDARY)


def test_adapters_everywhere_are_refused_by_name(tmp_path):
    model = make(None)
    with pytest.raises(BoundaryError, match=r"layers\.1\.self_attn\.q_proj\.lora_A.*trainable"):
        ActivationCache(model, tmp_path, BOUNDARY)
    assert train(model, DataLoader(Texts(), 4)) == train(make(None), DataLoader(Texts(), 4))


def test_a_frozen_adapter_in_the_front_is_part_of_it(tmp_path):
    losses, plain, stats = both(tmp_path, prior=True)
    assert losses == plain
    assert stats.hits == 2 * 4 * BATCHES


def disable(model):
    model.base_model.disable_adapter_layers()


def enable(model):
    model.base_model.enable_adapter_layers()
    freeze_front(model)


def scale(model):
    for module in model.modules():
        if "prior" in getattr(module, "lora_A", ()):
            module.set_scale("prior", 3.0)


MIDDLE, LATER = 2 * BATCHES + 2, 4 * BATCHES + 1
CHANGES = {
    "switched": {MIDDLE: lambda m: activate(m, "default"),
                 LATER: lambda m: activate(m, "default", "prior")},
    "disabled": {MIDDLE: disable, LATER: enable},
    "merged": {MIDDLE: lambda m: m.base_model.merge_adapter(["prior"]),
               LATER: lambda m: m.base_model.unmerge_adapter()},
    "added": {MIDDLE: lambda m: (m.add_adapter("third", lora([0])),
                                 activate(m, "default", "third"))},
    "deleted": {MIDDLE: lambda m: (m.delete_adapter("prior"), freeze_front(m))},
    "rescaled": {MIDDLE: scale},
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_change_in_mid_run_are_noticed(tmp_path, change):
    events = CHANGES[change]
    losses, plain, stats = both(tmp_path, prior=True, epochs=7, events=events)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert stats.hits > 4 * BATCHES  # before the change, and after it
    assert stats.hits > 4 * (MIDDLE - BATCHES)
    unchanged = train(make(prior=True), DataLoader(Texts(), 4), epochs=7)
    assert losses[:MIDDLE] == pytest.approx(unchanged[:MIDDLE], rel=1e-5)
    if change != "merged":  # which leaves the function what it was
        assert losses[MIDDLE] != pytest.approx(unchanged[MIDDLE], rel=1e-6)
