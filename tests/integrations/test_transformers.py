"""Hugging Face's Trainer with a cache, against the same Trainer without."""

import functools
import json
import logging

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from egeria_cache import ActivationCache, BoundaryError
from egeria_cache.integrations.transformers import EgeriaTrainer
from egeria_core import FreezeController, StaticPolicy
from tests.helpers.accelerated import in_processes
from tests.helpers.steps import Notes
from tests.helpers.trained import CAUSAL, CLASSES, bert, history, losses, make, train_both

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft


def llama():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip
    return model, "model.layers.1", [model.model.embed_tokens, *model.model.layers[:2]]


def both(build, directory, **options):
    ours = make(build, directory / "ours", cache_in=directory / "cache", **options)
    ours.train()
    plain = make(build, directory / "plain", **options)
    plain.train()
    return ours, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "epoch"},
        {"bf16": True},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ],
    ids=str,
)
def test_training_is_the_same_and_served(tmp_path, options):
    ours, plain = both(llama, tmp_path, **options)
    with ours.cache:
        tolerance = 1e-2 if "bf16" in options else 1e-5
        assert losses(ours) == pytest.approx(losses(plain), rel=tolerance)
        assert len(losses(ours)) >= 9
        assert ours.cache.stats().hits > 0
        assert ours.cache.stats().why_not is None


@pytest.mark.cases(1)
@pytest.mark.parametrize("evaluated_before", [False, True])
def test_noise_that_a_hook_adds_to_the_front_is_not_left_out(tmp_path, evaluated_before, caplog):
    """NEFTune asks whether the embedding trains; what is held in inference mode does not."""
    runs = []
    with caplog.at_level(logging.WARNING, logger="egeria"):
        for where in (tmp_path / "cache", None):
            trainer = make(llama, tmp_path / "out", cache_in=where, neftune_noise_alpha=5.0)
            if where is not None:
                trainer.cache.set_boundary("auto")
            if evaluated_before:
                trainer.evaluate()
            trainer.train()
            runs.append(losses(trainer))
            if where is not None:
                trainer.cache.close()
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert any("neftune_post_forward_hook" in record.message for record in caplog.records)
    trainer = make(llama, tmp_path / "out", cache_in=tmp_path / "cache", neftune_noise_alpha=5.0)
    with trainer.cache, pytest.raises(BoundaryError, match="neftune_post_forward_hook"):
        trainer.train()


def test_a_second_evaluation_is_all_hits(tmp_path):
    ours, plain = both(llama, tmp_path)
    with ours.cache:
        first = ours.evaluate()["eval_loss"]
        ours.cache.flush()
        before = ours.cache.stats().hits
        assert ours.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-6)
        assert first == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
        assert ours.cache.stats().hits - before == 16
        other = CAUSAL[16:32]  # another data set under the same name
        found, expected = (trainer.evaluate(other)["eval_loss"] for trainer in (ours, plain))
        assert found == pytest.approx(expected, rel=1e-5) != first


@pytest.mark.cases(1)
@pytest.mark.parametrize("at", [5, 7], ids="step_{}".format)
def test_a_resumed_run_goes_on_as_it_was_and_is_served(tmp_path, at):
    """Checkpoints at the end of an epoch (5 steps) and in mid-epoch."""
    options = {"save_strategy": "steps", "save_steps": at}
    whole, _ = both(llama, tmp_path, **options)
    whole.cache.close()
    resumed = make(llama, tmp_path / "again", cache_in=tmp_path / "cache", **options)
    with resumed.cache:
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / f"checkpoint-{at}"))
        assert losses(resumed)[at:] == pytest.approx(losses(whole)[at:], rel=1e-5)
        assert len(losses(resumed)) == 15
        # What the first run has stored serves from the second batch on.
        assert resumed.cache.stats().hits >= 8 * (15 - at - 3)


def test_what_the_cache_does_is_logged(tmp_path):
    ours, _ = both(llama, tmp_path)
    with ours.cache:
        hits = [value for (value,) in history(ours, "egeria_hits")]
        assert hits == sorted(hits)
        assert hits[-1] == ours.cache.stats().hits
        assert history(ours, "egeria_boundary") == [["model.layers.1"]]
        json.dumps(ours.state.log_history)


@pytest.mark.cases(1)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_controller_is_given_the_loss_of_every_step_and_its_state(tmp_path, steps):
    def train(name, controller, resume=None):
        class Mine(EgeriaTrainer):
            def __init__(self, **kwargs):
                super().__init__(controller=controller, **kwargs)

        trainer = make(
            llama, tmp_path / name, trainer=Mine, gradient_accumulation_steps=steps,
            save_strategy="steps", save_steps=3,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    notes, again = Notes(), Notes()
    trainer = train("first", notes)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert notes.losses == pytest.approx(logged, rel=1e-4)
    trainer = train("second", again, str(tmp_path / "first" / "checkpoint-3"))
    assert again.loaded == {"steps": 3}
    assert len(again.losses) == len(notes.losses) - 3
    trainer.controller = None  # put aside
    trainer.train()
    assert trainer.controller is None


@pytest.mark.cases(1)
@pytest.mark.parametrize("made_first", [True, False])
def test_a_freeze_controller_moves_the_boundary_and_goes_on_from_a_checkpoint(tmp_path, made_first):
    def run(name, resume=None):
        torch.manual_seed(0)
        model = bert()[0]
        cache = ActivationCache(model, tmp_path / name / "cache", gate="always")
        policy = StaticPolicy({4: "bert.encoder.layer.0"})
        args = TrainingArguments(
            str(tmp_path / name), per_device_train_batch_size=8, num_train_epochs=4, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=12,
            dataloader_pin_memory=False, logging_steps=1, learning_rate=1e-2,
        )  # fmt: skip
        controller = functools.partial(
            FreezeController, cache=cache, policy=policy, evaluate_every=1, evaluator="inline",
            layers=r"bert\.embeddings|bert\.encoder\.layer\.\d|classifier",
        )  # fmt: skip
        optimizers = (None, None)
        if made_first:
            optimizers = (torch.optim.SGD(model.parameters(), lr=1e-2), None)
            controller = controller(model, optimizers[0])
        trainer = EgeriaTrainer(
            model=model, args=args, train_dataset=CLASSES, cache=cache, controller=controller,
            optimizers=optimizers,
        )  # fmt: skip
        with cache:
            trainer.train(resume_from_checkpoint=resume)
            assert cache.boundary == "bert.encoder.layer.0"
            assert cache.stats().hits > 0
            trainer.controller.close()
        return trainer

    whole = run("whole")
    named = [value for (value,) in history(whole, "egeria_boundary")]
    assert named in (["None", "bert.encoder.layer.0"], ["bert.encoder.layer.0"])
    resumed = run("resumed", str(tmp_path / "whole" / "checkpoint-12"))
    assert losses(resumed)[12:] == pytest.approx(losses(whole)[12:], rel=1e-5)
    assert len(losses(resumed)) == 20


@pytest.mark.long
def test_every_process_of_a_distributed_training_is_served(tmp_path):
    for ours, plain in in_processes(train_both, 2, str(tmp_path)):
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
        assert len(plain[0]) == 12
        assert ours[1] > 0
        assert ours[2] is None
