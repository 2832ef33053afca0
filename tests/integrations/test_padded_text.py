"""Language models of `transformers` on real text, padded as its collators pad."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from egeria_cache import ActivationCache, EgeriaLoader

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS, NUM_SAMPLES, BATCH = 400, 48, 8


def lines() -> list[str]:
    """Return lines of the standard library's sources, of 3 to 40 words."""
    found = []
    for name in ("argparse.py", "ast.py", "bdb.py", "calendar.py", "cgi.py", "cmd.py", "codecs.py"):
        path = Path(sysconfig.get_paths()["stdlib"], name)
        text = path.read_text(errors="ignore") if path.exists() else ""
        found += [line.strip() for line in text.splitlines() if 3 <= len(line.split()) <= 40]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[i] for i in order[: 2 * NUM_SAMPLES]]


LINES = lines()


def tokenizer(side: str = "right") -> Any:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]", "[MASK]"]
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=WORDS, special_tokens=special)
    model.train_from_iterator(LINES, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", eos_token="[EOS]", mask_token="[MASK]", padding_side=side,
        model_max_length=64,
    )  # fmt: skip


class Examples(Dataset[Any]):
    """What a tokenizer gave, as dicts of lists."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, list) else v for k, v in self.items[index].items()}


def tokenized(task: str, words: Any) -> Examples:
    items = []
    for i, line in enumerate(LINES[:NUM_SAMPLES]):
        item = dict(words(line, truncation=True, max_length=40))
        if task != "classes with segments":
            item.pop("token_type_ids", None)
        if task.startswith("classes"):
            item["labels"] = i % 3
        elif task == "tags":
            item["labels"] = [token % 3 for token in item["input_ids"]]
        elif task == "translation":
            other = words(LINES[-i - 1], truncation=True, max_length=24)
            item["labels"] = other["input_ids"]
        elif task == "answers":  # the first token is given, not learnt
            item["labels"] = [-100, *item["input_ids"][1:]]
        else:
            item["labels"] = list(item["input_ids"])
        items.append(item)
    return Examples(items)


SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "pad_token_id": 0,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "dropout": 0.0, "pad_token_id": 0, "eos_token_id": 4,
    "decoder_start_token_id": 2, "forced_eos_token_id": 4, "bos_token_id": 2,
}  # fmt: skip


def bert(kind: str = "SequenceClassification") -> Any:
    config = transformers.BertConfig(**SMALL, **STILL, num_labels=3)
    return getattr(transformers, f"BertFor{kind}")(config)


def deberta() -> Any:
    return transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(
        **SMALL, **STILL, num_labels=3, relative_attention=True, position_buckets=8,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True,
        position_biased_input=False, pooler_hidden_size=16, pooler_dropout=0.0, type_vocab_size=0,
    ))  # fmt: skip


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    ))  # fmt: skip


def bart() -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQ2SEQ))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=4,
    ))  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64)
    )


def _collate(kind: str, side: str = "right", **options: Any) -> Callable[..., Any]:
    return getattr(transformers, f"DataCollator{kind}")(tokenizer(side), **options)


TEXT: dict[str, tuple[Callable[[], Any], str, Callable[..., Any], str, tuple[str, ...]]] = {
    "BERT": (bert, "classes with segments", _collate("WithPadding"), "bert.encoder.layer.0",
             ("bert.embeddings", "bert.encoder.layer.0")),
    "BERT, tags": (lambda: bert("TokenClassification"), "tags", _collate("ForTokenClassification"),
                   "bert.encoder.layer.0", ("bert.embeddings", "bert.encoder.layer.0")),
    "DeBERTa-v2": (deberta, "classes", _collate("WithPadding"), "deberta.encoder.layer.0",
                   ("deberta.embeddings", "deberta.encoder.layer.0", "deberta.encoder.rel",
                    "deberta.encoder.LayerNorm")),
    "T5, encoder": (t5, "translation", _collate("ForSeq2Seq"), "encoder", ("shared", "encoder")),
    "T5, in the decoder": (t5, "translation", _collate("ForSeq2Seq"), "decoder.block.0",
                           ("shared", "encoder", "decoder.block.0")),
    "BART, in the decoder": (
        bart, "translation", _collate("ForSeq2Seq"), "model.decoder.layers.0",
        ("model.shared", "model.encoder", "model.decoder.embed", "model.decoder.layernorm_emb",
         "model.decoder.layers.0"),
    ),
    "GPT-2": (gpt2, "text", _collate("ForSeq2Seq"), "transformer.h.0",
              ("transformer.w", "transformer.h.0", "lm_head")),
    "Llama": (llama, "text", _collate("ForSeq2Seq"), "model.layers.0",
              ("model.embed", "model.layers.0")),
    "Llama, padded on the left": (llama, "answers", _collate("ForSeq2Seq", "left"),
                                  "model.layers.0", ("model.embed", "model.layers.0")),
}  # fmt: skip


def losses(
    make: Callable[[], Any],
    data: Examples,
    collate: Callable[..., Any],
    boundary: str,
    front: tuple[str, ...],
    directory: Path | None,
    workers: int = 0,
) -> tuple[list[float], list[int], str | None]:
    torch.manual_seed(0)
    model = make().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(front))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05)
    how: dict[str, Any] = {
        "batch_size": BATCH, "shuffle": True, "collate_fn": collate, "num_workers": workers,
        "generator": torch.Generator().manual_seed(1),
    }  # fmt: skip
    cache, found, hits, why_not = None, [], [], None
    loader: Any = DataLoader(data, **how)
    if directory is not None:
        cache = ActivationCache(model, directory, boundary, gate="always")
        loader = EgeriaLoader(data, **how, cache=cache)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if cache is not None:
            cache.flush()
            hits.append(cache.stats().hits - sum(hits))
            why_not = cache.stats().why_not
    if cache is not None:
        cache.close()
    return found, hits, why_not


@pytest.mark.parametrize("name", TEXT)
def test_served_as_computed(tmp_path, name):
    make, task, collate, boundary, front = TEXT[name]
    data = tokenized(task, collate.tokenizer)
    workers = 2 if name == "BERT, tags" else 0
    plain, _, _ = losses(make, data, collate, boundary, front, None, workers)
    served, hits, why_not = losses(make, data, collate, boundary, front, tmp_path, workers)
    torch.testing.assert_close(served, plain, rtol=1e-5, atol=1e-5)
    assert hits == [0, NUM_SAMPLES, NUM_SAMPLES], why_not


REFUSED = {
    "GPT-2, padded on the left without positions": (
        gpt2, "answers", _collate("ForSeq2Seq", "left"), "transformer.h.0",
        ("transformer.w", "transformer.h.0", "lm_head"), "'transformer.h.0' depends on what stands",
    ),
    "Llama, padded on the left, whose loss begins there": (
        llama, "text", _collate("ForSeq2Seq", "left"), "model.layers.0",
        ("model.embed", "model.layers.0"), "loss depends on what stands",
    ),
    "tokens masked at random": (
        lambda: bert("MaskedLM"), "text", _collate("ForLanguageModeling", mlm=True, seed=None),
        "bert.encoder.layer.0", ("bert.embeddings", "bert.encoder.layer.0"),
        "is not what it is alone: the collate_fn sorts or mixes samples, or draws random numbers",
    ),
    "samples packed into one row": (
        llama, "text", transformers.DataCollatorWithFlattening(), "model.layers.0",
        ("model.embed", "model.layers.0"), "leave samples out by the sampler",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path, name):
    make, task, collate, boundary, front, told = REFUSED[name]
    data = tokenized(task, tokenizer())
    without = {"attention_mask"} if "packed" in name else {"labels"} if "masked" in name else set()
    data = Examples([{k: v for k, v in x.items() if k not in without} for x in data.items])
    torch.manual_seed(0)
    plain, _, _ = losses(make, data, collate, boundary, front, None)
    served, hits, why_not = losses(make, data, collate, boundary, front, tmp_path)
    torch.testing.assert_close(served, plain, rtol=1e-5, atol=1e-5)
    assert hits == [0, 0, 0]
    assert told in why_not


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
