"""Hugging Face's Trainer with and without a cache; a run of both in one process of several."""

import os
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from egeria_cache import ActivationCache
from egeria_cache.integrations.transformers import EgeriaTrainer

TOKENS = torch.randint(3, 50, (40, 8), generator=torch.Generator().manual_seed(0))
CAUSAL = [{"input_ids": row, "labels": row} for row in TOKENS]
CLASSES = [
    {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row.sum()) % 3}
    for row in TOKENS
]


def bert():
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, num_labels=3,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, classifier_dropout=0.1,
        )
    )  # fmt: skip
    return model, "bert.encoder.layer.1", [model.bert.embeddings, *model.bert.encoder.layer[:2]]


def make(build, directory, *, cache_in=None, trainer=None, **options):
    """Return a Trainer, with a cache if `cache_in` names its directory."""
    torch.manual_seed(0)
    model, boundary, front = build()
    for module in front:
        module.requires_grad_(False)
    defaults = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_train_epochs": 3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "dataloader_pin_memory": False, "learning_rate": 1e-2,
        "logging_nan_inf_filter": False,
    }  # fmt: skip
    extra = {}
    if cache_in is not None:
        trainer = trainer or EgeriaTrainer
        extra["cache"] = ActivationCache(model, cache_in, boundary, gate="always")
    data = CLASSES if build is bert else CAUSAL
    return (trainer or Trainer)(
        model=model, args=TrainingArguments(str(directory), **(defaults | options)),
        train_dataset=data, eval_dataset=data[:16], **extra,
    )  # fmt: skip


def history(trainer, *names):
    return [
        [row[name] for name in names if name in row]
        for row in trainer.state.log_history
        if any(name in row for name in names)
    ]


def losses(trainer):
    return [value for row in history(trainer, "loss", "eval_loss") for value in row]


def train_both(directory):
    """Return [(losses, hits, why nothing was cached)] with a cache and without."""
    return [_train(directory, with_cache) for with_cache in (True, False)]


def _train(directory, with_cache):
    own = Path(directory, os.environ["RANK"])
    trainer = make(
        bert, own / "run", cache_in=own if with_cache else None, eval_strategy="epoch",
        ddp_backend="gloo",
    )  # fmt: skip
    trainer.train()
    if not with_cache:
        return losses(trainer), 0, None
    with trainer.cache as cache:
        return losses(trainer), cache.stats().hits, cache.stats().why_not
