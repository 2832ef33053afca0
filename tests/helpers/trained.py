"""A run of Hugging Face's Trainer in one process of several, with and without a cache."""

import os
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from egeria_cache import ActivationCache
from egeria_cache.integrations.transformers import EgeriaTrainer


def bert():
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16, num_labels=3,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, classifier_dropout=0.1,
        )
    )  # fmt: skip
    return model, "bert.encoder.layer.1", [model.bert.embeddings, *model.bert.encoder.layer[:2]]


def train_both(directory):
    """Return [(losses, hits, why nothing was cached)] with a cache and without."""
    return [_train(directory, with_cache) for with_cache in (True, False)]


def _train(directory, with_cache):
    rows = torch.randint(3, 50, (40, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": int(row.sum()) % 3} for row in rows]
    torch.manual_seed(0)
    model, boundary, frozen = bert()
    for module in frozen:
        module.requires_grad_(False)
    own, extra = Path(directory, os.environ["RANK"]), {}
    if with_cache:
        extra["cache"] = ActivationCache(model, own, boundary, gate="always")
    args = TrainingArguments(
        str(own / "run"), per_device_train_batch_size=8, num_train_epochs=3, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=1e-2,
        dataloader_pin_memory=False, eval_strategy="epoch", ddp_backend="gloo",
        logging_nan_inf_filter=False,
    )  # fmt: skip
    trainer = (EgeriaTrainer if with_cache else Trainer)(
        model=model, args=args, train_dataset=data, eval_dataset=data[:16], **extra
    )
    trainer.train()
    names = ("loss", "eval_loss")
    losses = [row[name] for row in trainer.state.log_history for name in names if name in row]
    if not with_cache:
        return losses, 0, None
    with extra["cache"] as cache:
        return losses, cache.stats().hits, cache.stats().why_not
