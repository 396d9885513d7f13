"""Tiny random models, processors and tokenizers, made in code: nothing is downloaded.

Every builder takes a seed and returns `(model, processor)`; `tiny_captioner(family)` returns a [`Captioner`].
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers import decoders as token_decoders
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    EfficientNetConfig,
    EfficientNetModel,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    GPT2Config,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
)

from hf_captionrl.captioners import Captioner, ProcessorPair, load_captioner
from hf_captionrl.captioners.clipcap import ClipCapConfig, ClipCapForConditionalGeneration, ClipCapProcessor
from hf_captionrl.utils.io import write_jsonl

WORDS = (
    "a an the of picture photo is on in with and two three red green blue yellow small large cat dog bird tree house "
    "left right above below near ball car boat fish apple pig whale bus"
).split()
FAMILIES = ("blip", "git", "vit-gpt2", "vit-bert", "clipcap")
HIDDEN, LAYERS, HEADS, IMAGE_SIZE, PATCH, POSITIONS = 32, 2, 4, 16, 8, 64
_MEAN_STD: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VISION = {**_SHARED, "image_size": IMAGE_SIZE, "patch_size": PATCH}
_SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
_CROPPED: dict[str, Any] = {"size": {"shortest_edge": IMAGE_SIZE}, "crop_size": _SQUARE, **_MEAN_STD}


def wordpiece_tokenizer(extra: tuple[str, ...] = ("[DEC]", "[ENC]")) -> Any:
    """BERT's kind, with `##s` and `##a` forms."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *extra]
    pieces = ["##s", "##a", "##the", "##red", "##cat", "##ing", "."]
    vocabulary = {token: index for index, token in enumerate([*special, *WORDS, *pieces])}
    tokenizer = BertTokenizerFast(vocab=vocabulary)
    if extra:
        tokenizer.add_special_tokens({"bos_token": extra[0], "additional_special_tokens": list(extra[1:])})
    return tokenizer


def byte_tokenizer(words: Iterable[str], first: Iterable[str] = (), last: Iterable[str] = ()) -> Tokenizer:
    """Bytes and a few words, and special tokens before and after them."""
    tokens = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for word in words:
        left = word[0]
        for letter in word[1:]:
            if (left, letter) not in merges:
                merges.append((left, letter))
                vocabulary.setdefault(left + letter, len(vocabulary))
            left += letter
    vocabulary |= {token: len(vocabulary) + index for index, token in enumerate(last)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    return tokenizer


def bpe_tokenizer() -> Any:
    """GPT-2's kind: bytes, blanks in front of words, one special token for start, end and padding."""
    end = "<|endoftext|>"
    tokenizer = byte_tokenizer(("Ġa", "Ġcat", "Ġof", "Ġred", "cat", "red"), last=[end])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, pad_token=end)


def _spread(model: torch.nn.Module) -> torch.nn.Module:
    """Weights larger than the usual initialisation, so that captions differ between images."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                continue
            for parameter in module.parameters(recurse=False):
                parameter.normal_(0, 0.15 if parameter.dim() > 1 else 0.1)
    return model.eval()


def tiny_blip(seed: int = 0, **text: Any) -> tuple[Any, Any]:
    """`BlipForConditionalGeneration` and `BlipProcessor`; more settings go into its text configuration."""
    torch.manual_seed(seed)
    tokenizer = wordpiece_tokenizer()
    settings: dict[str, Any] = {
        **_SHARED,
        "encoder_hidden_size": HIDDEN,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": POSITIONS,
        "bos_token_id": tokenizer.convert_tokens_to_ids("[DEC]"),
        "sep_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **text,
    }
    config = BlipConfig(
        text_config=settings, vision_config=_VISION, projection_dim=HIDDEN, image_text_hidden_size=HIDDEN
    )
    processor = BlipProcessor(BlipImageProcessor(size=_SQUARE, **_MEAN_STD), tokenizer)
    return _spread(BlipForConditionalGeneration(config)), processor


def tiny_git(seed: int = 0, **text: Any) -> tuple[Any, Any]:
    """`GitForCausalLM` and `GitProcessor`; more settings go into its configuration."""
    torch.manual_seed(seed)
    tokenizer = wordpiece_tokenizer(extra=())
    config = GitConfig(
        **_SHARED,
        **_NO_DROPOUT,
        vision_config=_VISION,
        **{"vocab_size": len(tokenizer), **text},
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _spread(GitForCausalLM(config)), GitProcessor(CLIPImageProcessor(**_CROPPED), tokenizer)


def _gpt2(tokenizer: Any, **settings: Any) -> GPT2Config:
    """Of twice the width; start and end are one token."""
    end = tokenizer.eos_token_id
    sizes = {"n_embd": 2 * HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end}
    return GPT2Config(**{**sizes, **no_dropout, **ids, **settings})


def _tiny_encoder_decoder(decoder: Any, tokenizer: Any, ids: dict[str, Any], seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**_VISION, **_NO_DROPOUT), decoder, **ids
    )
    processor = ProcessorPair(ViTImageProcessor(size=_SQUARE, **_MEAN_STD), tokenizer)
    return _spread(VisionEncoderDecoderModel(config)), processor


def tiny_vit_gpt2(seed: int = 0, **ids: Any) -> tuple[Any, Any]:
    """ViT + GPT-2 of another width (so that there is a connector); start, end and padding are one token."""
    tokenizer = bpe_tokenizer()
    ids = ids or dict.fromkeys(("decoder_start_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    return _tiny_encoder_decoder(_gpt2(tokenizer), tokenizer, ids, seed)


def tiny_vit_bert(seed: int = 0, **ids: Any) -> tuple[Any, Any]:
    """ViT + BERT of one width."""
    tokenizer = wordpiece_tokenizer(extra=())
    decoder = BertConfig(**_SHARED, **_NO_DROPOUT, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    ids = ids or {
        "decoder_start_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return _tiny_encoder_decoder(decoder, tokenizer, ids, seed)


def tiny_clipcap(seed: int = 0, *, text: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """CLIP + GPT-2 of another width; start, end and padding are one token, and there is a token for the full stop."""
    torch.manual_seed(seed)
    tokenizer = bpe_tokenizer()
    positions = POSITIONS + settings.setdefault("prefix_length", 3) - 1
    own = {"n_positions": positions, "pad_token_id": tokenizer.eos_token_id, **(text or {})}
    config = ClipCapConfig(CLIPVisionConfig(**_VISION, projection_dim=24), _gpt2(tokenizer, **own), **settings)
    processor = ClipCapProcessor(CLIPImageProcessor(**_CROPPED), tokenizer)
    return _spread(ClipCapForConditionalGeneration(config)), processor


def tiny_model(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Model and processor of one of `FAMILIES`."""
    return globals()[f"tiny_{family.replace('-', '_')}"](seed)


def tiny_captioner(family: str = "blip", *, prompt: str = "", seed: int = 0) -> Captioner:
    """A captioner of one of `FAMILIES`."""
    model, processor = tiny_model(family, seed)
    return load_captioner(model, processor=processor, prompt=prompt)


def tiny_images(number: int, seed: int = 0, size: int = IMAGE_SIZE) -> list[Image.Image]:
    """Random images."""
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(number)]


def tiny_captions(number: int, seed: int = 0, words: tuple[int, int] = (2, 7)) -> list[str]:
    """Random captions of the tiny vocabulary."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(words[0], words[1] + 1))) for _ in range(number)]


def write_photos(folder: Path, rows: Any, names: str = "{}.png") -> Path:
    """Scenes as image files, and the file with their captions."""
    folder.mkdir(parents=True)
    lines = []
    for number, row in enumerate(rows):
        row["image"].save(folder / names.format(number))
        lines.append({"file_name": names.format(number), "captions": row["captions"]})
    return write_jsonl(folder / "metadata.jsonl", lines)


def write_captions(path: Path, image_ids: Iterable[str], captions: Iterable[str]) -> Path:
    """A file as `captionrl caption` writes it."""
    return write_jsonl(path, [{"image_id": i, "caption": c} for i, c in zip(image_ids, captions, strict=True)])


def tiny_tower(folder, seed=0):
    """Folder of a convolutional tower, which has no projection and no patches."""
    config = EfficientNetConfig(
        image_size=32,
        width_coefficient=0.1,
        depth_coefficient=0.1,
        hidden_dim=128,
        num_block_repeats=[1] * 7,
        dropout_rate=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = EfficientNetModel(config)
        for weight in (p for p in model.parameters() if p.ndim == 4):
            torch.nn.init.kaiming_normal_(weight)  # the features would underflow
        model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder
