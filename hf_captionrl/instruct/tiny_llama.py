"""A LLaMA that is small enough to train on one CPU thread, with random weights and a small tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["TINY_LLAMA", "tiny_llama"]

TINY_LLAMA = "tiny-llama"
"""Model name that selects it in a recipe."""

_SPECIAL = ["<unk>", "<s>", "</s>"]


def _tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    unknown, begin, end = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=unknown
    )


def tiny_llama(
    texts: Iterable[str], *, vocab_size: int = 1024, width: int = 64, layers: int = 2, seed: int = 0
) -> tuple[Any, Any]:
    """A LLaMA with random weights, and a byte-level BPE tokenizer of 259 to `vocab_size` tokens, trained on the texts."""
    if vocab_size < 259:
        raise ValueError(f"vocab_size is {vocab_size}. Use at least 259: 256 bytes and 3 special tokens.")
    tokenizer = _tokenizer(texts, vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model, tokenizer
