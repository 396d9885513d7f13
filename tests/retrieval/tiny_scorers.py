"""Tiny scorers with their real tokenizers and image processors."""

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
)

WORDS = "a red blue cat dog on under the mat big small two zebra".split()


CAPTIONS = ["a red cat", "a", "two small blue dog on the big red mat", "the zebra on the mat", "a red cat"]


LIMIT = 12


def make_tokenizer(specials=("<bos>", "<pad>", "<eos>"), *, last=(), max_length=LIMIT, mask=True, bos=True):
    vocab = {word: i for i, word in enumerate([*specials, *WORDS, *last])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = [(token, vocab[token]) for token in ("<bos>", "<eos>")]
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if bos else "$A <eos>", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"] if mask else ["input_ids"],
    )


def make_images(number=3):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (40, 30 + i, 3), dtype=np.uint8)) for i in range(number)]


def assert_unit(features, rows):
    assert features.dtype == torch.float32
    assert features.shape[0] == rows
    assert not features.requires_grad
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(rows))
