"""Tiny random chat models with their real processors: nothing is downloaded.

`tiny_chat(model_type)` returns `(model, processor)`. Images of two shapes give rows of two lengths wherever the real
processor makes tiles or keeps the native resolution.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_captionrl.captioners.language_model_clients import TransformersVisionBackend
from tests.tiny import _CROPPED, _MEAN_STD, _SHARED, _SQUARE, _VISION, HIDDEN, WORDS, _spread, byte_tokenizer

CHAT_TYPES = tuple(
    "llava llava_onevision idefics3 smolvlm paligemma qwen2_vl qwen2_5_vl qwen3_vl internvl gemma3".split()
)
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>\n{% else %}{{ c['text'] }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def chat_tokenizer(extra: tuple[str, ...], **named: str) -> Any:
    """Bytes and a few words with the blank in front, and the special tokens of a chat."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", *extra]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer([f"Ġ{word}" for word in WORDS[:12]], special),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", *extra],
        extra_special_tokens=named,
    )


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        **_SHARED,
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        **more,
    }


def _finish(model: Any, tokenizer: Any) -> Any:
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    return _spread(model)


LLAVA: dict[str, Any] = {
    "patch_size": 8,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "chat_template": _LLAVA_TEMPLATE,
}


def _llava() -> tuple[Any, Any]:
    tokenizer = chat_tokenizer(("<image>",), image_token="<image>")
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **_VISION},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-2,
    )
    processor = transformers.LlavaProcessor(transformers.CLIPImageProcessor(**_CROPPED), tokenizer, **LLAVA)
    return transformers.LlavaForConditionalGeneration(config), processor


def _llava_onevision() -> tuple[Any, Any]:
    tokenizer = chat_tokenizer(("<image>", "<video>"), image_token="<image>", video_token="<video>")
    pinpoints = [[16, 16], [16, 32], [32, 16]]
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_text(tokenizer)},
        vision_config={"model_type": "siglip_vision_model", **_VISION},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
    )
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=pinpoints, **_MEAN_STD),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=_SQUARE),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=_TEMPLATE.replace("IMAGE", "<image>").replace("VIDEO", "<video>"),
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


def _idefics3(smol: bool = False) -> tuple[Any, Any]:
    extra = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    grid = tuple(f"<row_{r}_col_{c}>" for r in (1, 2, 3, 4) for c in (1, 2, 3, 4))
    tokenizer = chat_tokenizer(
        (*extra, *grid),
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    name = "SmolVLM" if smol else "Idefics3"
    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={**_VISION},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    images = getattr(transformers, f"{name}ImageProcessor")(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, **_MEAN_STD
    )
    template = _TEMPLATE.replace("IMAGE", "<image>").replace("<|im_end|>\n", "<end_of_utterance>\n")
    settings: dict[str, Any] = {"image_seq_len": 1, "chat_template": template}
    if smol:
        videos = transformers.SmolVLMVideoProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 16})
        processor = transformers.SmolVLMProcessor(images, tokenizer, videos, **settings)
    else:
        processor = transformers.Idefics3Processor(images, tokenizer, **settings)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _paligemma() -> tuple[Any, Any]:
    tokenizer = chat_tokenizer(("<image>",), image_token="<image>")
    images = transformers.SiglipImageProcessor(size=_SQUARE, **_MEAN_STD)
    images.image_seq_length = 4
    processor = transformers.PaliGemmaProcessor(images, tokenizer)  # adds a thousand tokens for places
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma2", **_text(tokenizer, head_dim=8, query_pre_attn_scalar=8)},
        vision_config={"model_type": "siglip_vision_model", **_VISION, "projection_dim": HIDDEN},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.PaliGemmaForConditionalGeneration(config), processor


def qwen(name: str, vision: dict[str, Any], processor: str = "", **text: Any) -> tuple[Any, Any]:
    """Of any version; `processor` names another version whose processor it has, `text` changes the language model."""
    special = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = chat_tokenizer(special, image_token="<|image_pad|>", video_token="<|video_pad|>")
    names = [f"{what}_token_id" for what in ("vision_start", "vision_end", "image", "video")]
    config = getattr(transformers, f"{name}Config")(
        text_config={**_text(tokenizer), **text},
        vision_config={"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, **vision},
        tie_word_embeddings=False,
        **dict(zip(names, tokenizer.convert_tokens_to_ids(list(special)), strict=True)),
    )
    processor = processor or name
    pixels = {"shortest_edge": 16 * 16, "longest_edge": 16 * 64}
    images = transformers.Qwen2VLImageProcessor(size=pixels, patch_size=8, merge_size=2, **_MEAN_STD)
    videos = getattr(transformers, f"{processor.replace('2_5_VL', '2VL')}VideoProcessor")()
    template = _TEMPLATE.replace("{{ bos_token }}", "").replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    template = template.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>")
    made = getattr(transformers, f"{processor}Processor")(images, tokenizer, videos, chat_template=template)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), made


GRID = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "out_hidden_size": HIDDEN}
"""Of Qwen's vision towers."""
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}


def _qwen2_vl() -> tuple[Any, Any]:
    return qwen("Qwen2VL", {"embed_dim": HIDDEN, "hidden_size": HIDDEN, "mlp_ratio": 2}, **_ROPE)


def _qwen2_5_vl() -> tuple[Any, Any]:
    return qwen("Qwen2_5_VL", {**GRID, "window_size": 32, "fullatt_block_indexes": [1]}, **_ROPE)


def _qwen3_vl() -> tuple[Any, Any]:
    vision = {**GRID, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return qwen("Qwen3VL", vision, **_ROPE, head_dim=8)


def _internvl() -> tuple[Any, Any]:
    extra = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    tokenizer = chat_tokenizer(
        extra,
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_text(tokenizer)},
        vision_config={**_VISION, "image_size": [16, 16], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=1,
        downsample_ratio=0.5,
    )
    images = transformers.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, max_patches=4, **_MEAN_STD)
    processor = transformers.InternVLProcessor(
        images,
        tokenizer,
        transformers.InternVLVideoProcessor(size=_SQUARE),
        image_seq_length=1,
        chat_template=_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n").replace("VIDEO", "<video>\n"),
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def _gemma3() -> tuple[Any, Any]:
    extra = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    tokenizer = chat_tokenizer(
        extra, image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
    )
    ids = tokenizer.convert_tokens_to_ids(list(extra))
    config = transformers.Gemma3Config(
        text_config=_text(
            tokenizer, head_dim=8, query_pre_attn_scalar=8, sliding_window=64, final_logit_softcapping=5.0
        ),
        vision_config={**_VISION, "image_size": 32},
        mm_tokens_per_image=4,
        image_token_index=ids[0],
        boi_token_index=ids[1],
        eoi_token_index=ids[2],
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}, **_MEAN_STD)
    processor = transformers.Gemma3Processor(
        images, tokenizer, image_seq_length=4, chat_template=_TEMPLATE.replace("IMAGE", "<start_of_image>")
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


def chat_backend(kind: str, folder: Any, **settings: Any) -> TransformersVisionBackend:
    """A vision backend of a tiny chat model, whose files are written to a folder."""
    for part in tiny_chat(kind):
        part.save_pretrained(folder)
    return TransformersVisionBackend(str(folder), device="cpu", **{"dtype": "float32", **settings})


def tiny_chat(model_type: str, seed: int = 0) -> tuple[Any, Any]:
    """A chat model in eval mode with its processor."""
    torch.manual_seed(seed)
    model, processor = _idefics3(smol=True) if model_type == "smolvlm" else globals()[f"_{model_type}"]()
    return _finish(model, processor.tokenizer), processor


class HandSet:
    """Makes the logits of a vision backend's model those of `decide(colours, text)`, which maps letters to logits.

    `colours` are the images of the prompt, `"r"`, `"g"` or `"b"` by their largest channel. Other tokens have logit 0. The logits
    are the same at every position of the answer. `forwards` counts the runs of the model.
    """

    def __init__(self, backend: Any, decide: Any = None) -> None:
        self.backend, self.decide, self.forwards, self.table = backend, decide, 0, torch.zeros(0)
        backend._model.lm_head.register_forward_hook(
            lambda module, given, output: self.table.expand(*output.shape[:-1], -1)
        )
        backend._model.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: Any, given: Any, named: dict[str, Any]) -> None:
        self.forwards += 1
        if named.get("pixel_values") is not None:
            colours = ["rgb"[int(image.mean((1, 2)).argmax())] for image in named["pixel_values"]]
            self.table = self.logits(colours, self.backend._tokenizer.decode(named["input_ids"][0]))

    def logits(self, colours: list[str], text: str) -> torch.Tensor:
        table = torch.zeros(self.backend._model.lm_head.out_features)
        for letter, value in self.decide(colours, text).items():
            table[self.backend._tokenizer.convert_tokens_to_ids(letter)] = value
        return table

    def log_prob(self, colours: list[str], text: str, answer: str) -> float:
        """What a plain loop over the answer's letters finds, after a word: the blank is `Ġ`."""
        table = self.logits(colours, text).double()
        total = table.exp().sum().log()
        ids = self.backend._tokenizer.convert_tokens_to_ids(list("Ġ" + answer))
        return sum(float(table[token] - total) for token in ids)
