"""Tiny random BLIP-2, InstructBLIP with their real processors.

`tiny_family(name)` returns `(model, processor)`; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.tiny import (
    _MEAN_STD,
    _NO_DROPOUT,
    _SHARED,
    _SQUARE,
    _VISION,
    HEADS,
    HIDDEN,
    LAYERS,
    WORDS,
    _spread,
    wordpiece_tokenizer,
)
from tests.tiny.chat import chat_tokenizer

FAMILY_NAMES = tuple("blip2-opt blip2-t5 instructblip-llama instructblip-t5".split())
_T5: dict[str, Any] = {"num_layers": LAYERS, "num_heads": HEADS, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN}
_T5 |= {"d_model": HIDDEN, "dropout_rate": 0.0}


def metaspace_tokenizer() -> Any:
    """T5's kind: a word is one id and carries its blank, whatever stands before it, and `</s>` ends every text."""
    tokens = ["<pad>", "</s>", "<unk>", *(f"▁{word}" for word in WORDS)]
    tokens += [f"▁{word}" for word in ("An", "image", "What", "does", "the", "describe?") if f"▁{word}" not in tokens]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def _blip2(language: str, instruct: bool) -> tuple[Any, Any]:
    if language == "t5":
        tokenizer = metaspace_tokenizer()
    else:
        tokenizer = chat_tokenizer(())
        start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = start
    size: dict[str, Any] = {"size": _SQUARE, **_MEAN_STD}
    settings: dict[str, Any] = {"num_query_tokens": 3}
    if instruct:
        settings["qformer_tokenizer"] = wordpiece_tokenizer(extra=())
    name = "InstructBlip" if instruct else "Blip2"
    processor = getattr(transformers, f"{name}Processor")(
        transformers.BlipImageProcessor(**size), tokenizer, **settings
    )
    ids = tokenizer.get_vocab()
    text: dict[str, Any] = {"vocab_size": len(tokenizer) + 3, "pad_token_id": ids["<pad>"]}
    if language == "t5":
        text |= {**_T5, "model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        text |= {"decoder_start_token_id": ids["<pad>"], "eos_token_id": ids["</s>"]}
    elif language == "opt":
        # The end is a newline, as in the published checkpoints.
        newline = tokenizer("\n", add_special_tokens=False).input_ids[0]
        text |= {"model_type": "opt", "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}
        text |= {**_SHARED, "max_position_embeddings": 64, "bos_token_id": ids["<s>"], "eos_token_id": newline}
    else:
        text |= {"model_type": "llama", **_SHARED, "num_key_value_heads": 2, "max_position_embeddings": 64}
        text |= {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    config = getattr(transformers, f"{name}Config")(
        vision_config=_VISION,
        qformer_config={**_SHARED, **_NO_DROPOUT, "vocab_size": len(wordpiece_tokenizer(extra=()))},
        text_config=text,
        num_query_tokens=3,
        image_token_index=ids["<image>"],
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def tiny_family(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A model in eval mode with its processor."""
    torch.manual_seed(seed)
    model, processor = _blip2(name.split("-")[1], name.startswith("instructblip"))
    model = _spread(model)
    model.tie_weights()
    return model, processor
