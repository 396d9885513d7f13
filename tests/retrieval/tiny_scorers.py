"""Tiny scorers with real tokenizers and image processors."""

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

WORDS = "a red blue cat dog on under the mat big small two zebra".split()
CAPTIONS = ["a red cat", "a", "two small blue dog on the big red mat", "the zebra on the mat", "a red cat"]
LIMIT = 12


def make_tokenizer(specials=("<bos>", "<pad>", "<eos>"), *, last=(), bos=True):
    vocab = {word: i for i, word in enumerate([*specials, *WORDS, *last])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = [(token, vocab[token]) for token in ("<bos>", "<eos>")]
    single = "<bos> $A <eos>" if bos else "$A <eos>"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        model_max_length=LIMIT,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_clip(tokenizer=None, *, eos=None, seed=0):
    # EOS has the highest id, as in OpenAI's vocabulary, and not the 2 of legacy pooling.
    tokenizer = tokenizer or make_tokenizer(("<bos>", "<pad>"), last=("<eos>",))
    torch.manual_seed(seed)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **small,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": LIMIT,
            "eos_token_id": tokenizer.eos_token_id if eos is None else eos,
            "bos_token_id": tokenizer.bos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**small, "image_size": 32, "patch_size": 16},
        projection_dim=8,
        logit_scale_init_value=float(np.log(100.0)),
    )
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    model = CLIPModel(config)
    with torch.no_grad():  # with small initial weights, features are nearly equal and hide wrong pooling
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model, CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def make_images(number=3):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (40, 30 + i, 3), dtype=np.uint8)) for i in range(number)]


def assert_unit(features, rows):
    assert features.dtype == torch.float32
    assert features.shape[0] == rows
    assert not features.requires_grad
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(rows))
