"""Tiny random models of types that only the check at loading knows, in the layout of their published checkpoints.

`tiny_any_chat(name)` returns `(model, processor)` as `tests.tiny.chat.tiny_chat` does.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.tiny import _MEAN_STD, _SQUARE, _VISION, HIDDEN
from tests.tiny.chat import _TEMPLATE, GRID, LLAVA, _finish, _text, chat_tokenizer, qwen

ANY_CHAT_TYPES = tuple(
    "gemma4 qwen3_5 qwen4_exp qwen3_vl_moe llava_next mistral3 lfm2_vl glm4v molmo2 minicpmv4_6".split()
)
_WITHOUT_START = _TEMPLATE.replace("{{ bos_token }}", "")
_ENCODER = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
_LAYERS = {**_ENCODER, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
# Three layers with a state to one with attention, as in all published sizes of Qwen3.5.
_HYBRID = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}


def _ids(tokenizer: Any, *tokens: str) -> Any:
    return tokenizer.convert_tokens_to_ids(list(tokens))


def _gemma4() -> tuple[Any, Any]:
    special = ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>")
    names = [f"{name}_token" for name in ("image", "boi", "eoi", "video", "audio", "boa", "eoa")]
    tokenizer = chat_tokenizer(special, **dict(zip(names, special, strict=True)))
    image, begin, end, video, audio, *_ = _ids(tokenizer, *special)
    text = _text(tokenizer, head_dim=8, global_head_dim=8, sliding_window=64, final_logit_softcapping=5.0)
    text |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": len(tokenizer)}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "use_bidirectional_attention": "vision"}
    vision = {**_LAYERS, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        boi_token_id=begin,
        eoi_token_id=end,
        video_token_id=video,
        audio_token_id=audio,
        tie_word_embeddings=False,
    )
    # The processor allows only the numbers of image tokens that were trained with; 70 is the least.
    images = transformers.Gemma4ImageProcessor(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    videos = transformers.Gemma4VideoProcessor(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    template = _TEMPLATE.replace("IMAGE", "\n\n<|image|>\n\n")
    sound = transformers.Gemma4AudioFeatureExtractor()
    processor = transformers.Gemma4Processor(sound, images, tokenizer, videos, chat_template=template)
    return transformers.Gemma4ForConditionalGeneration(config), processor


def _qwen3_5() -> tuple[Any, Any]:
    return qwen("Qwen3_5", {**GRID, "num_position_embeddings": 16}, "Qwen3VL", **_HYBRID)


def _qwen4_exp() -> tuple[Any, Any]:
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    indexer = {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 64, "compress_ratio": 4}
    text = {**_HYBRID, **experts, **{f"indexer_{name}": value for name, value in indexer.items()}}
    text |= {"num_experts_per_tok": 2, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [], "split_ngram_parts": 1}
    return qwen("Qwen4Exp", {**GRID, "num_position_embeddings": 16}, "Qwen3VL", **text)


def _qwen3_vl_moe() -> tuple[Any, Any]:
    rope = {**_ROPE, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    text = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {**GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return qwen("Qwen3VLMoe", vision, "Qwen3VL", rope_parameters=rope, **text)


def _llava_next() -> tuple[Any, Any]:
    tokenizer = chat_tokenizer(("<image>",), image_token="<image>")
    pinpoints = [[16, 32], [32, 16], [32, 32]]
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "mistral", **_text(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **_VISION},
        image_token_index=_ids(tokenizer, "<image>")[0],
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-2,
    )
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size=_SQUARE, image_grid_pinpoints=pinpoints, **_MEAN_STD
    )
    processor = transformers.LlavaNextProcessor(images, tokenizer, **LLAVA)
    return transformers.LlavaNextForConditionalGeneration(config), processor


def _joycaption() -> tuple[Any, Any]:
    """LLaVA with SigLIP, all of whose tokens the language model reads, and the tokens of Llama 3."""
    special = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|image|>")
    tokenizer = chat_tokenizer(special, image_token="<|image|>")
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False},
        image_token_index=_ids(tokenizer, "<|image|>")[0],
        image_seq_length=4,
        vision_feature_layer=-2,
        vision_feature_select_strategy="full",
    )
    template = (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    images = transformers.SiglipImageProcessor(size=_SQUARE, **_MEAN_STD)
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="full", chat_template=template
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _mistral3() -> tuple[Any, Any]:
    tokenizer = chat_tokenizer(("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"), image_token="[IMG]")
    vision = {**_VISION, "model_type": "pixtral", "image_size": 32, "patch_size": 4}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **_text(tokenizer, head_dim=8)},
        vision_config=vision,
        image_token_index=_ids(tokenizer, "[IMG]")[0],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    images = transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=8, **_MEAN_STD)
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% endif %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}[IMG]{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
        "{% if m['role'] == 'user' %}[/INST]{% else %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    processor = transformers.PixtralProcessor(
        images, tokenizer, patch_size=4, spatial_merge_size=2, chat_template=template
    )
    return transformers.Mistral3ForConditionalGeneration(config), processor


def _lfm2_vl() -> tuple[Any, Any]:
    grid = tuple(f"<|img_row_{r}_col_{c}|>" for r in (1, 2, 3, 4) for c in (1, 2, 3, 4))
    special = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    names = [f"{name}_token" for name in ("image", "image_start", "image_end", "image_thumbnail")]
    tokenizer = chat_tokenizer((*special, *grid), **dict(zip(names, special, strict=True)))
    text = _text(tokenizer, model_type="lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8)
    vision = {key: value for key, value in _VISION.items() if key != "image_size"}
    config = transformers.Lfm2VlConfig(
        text_config=text,
        vision_config={**vision, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        image_token_id=_ids(tokenizer, "<image>")[0],
        projector_hidden_size=HIDDEN,
        tie_word_embeddings=False,
    )
    images = transformers.Lfm2VlImageProcessor(
        size={"height": 32, "width": 32},
        tile_size=32,
        encoder_patch_size=8,
        min_image_tokens=1,
        **{"max_image_tokens": 4, "max_tiles": 4, "max_pixels_tolerance": 1.0, **_MEAN_STD},
    )
    processor = transformers.Lfm2VlProcessor(images, tokenizer, chat_template=_TEMPLATE.replace("IMAGE", "<image>"))
    return transformers.Lfm2VlForConditionalGeneration(config), processor


def _glm4v() -> tuple[Any, Any]:
    special = (
        *("[gMASK]", "<sop>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        *("<|begin_of_video|>", "<|end_of_video|>"),
    )
    tokenizer = chat_tokenizer(special, image_token="<|image|>", video_token="<|video|>")
    _, _, begin, end, image, video, *_ = _ids(tokenizer, *special)
    config = transformers.Glm4vConfig(
        text_config=_text(
            tokenizer, rope_parameters={**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
        ),
        vision_config={**GRID, "depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "image_size": 32},
        image_token_id=image,
        video_token_id=video,
        image_start_token_id=begin,
        image_end_token_id=end,
    )
    size = {"shortest_edge": 16 * 16 * 2, "longest_edge": 16 * 64 * 2}
    images = transformers.Glm4vImageProcessor(size=size, patch_size=8, merge_size=2, **_MEAN_STD)
    template = "[gMASK]<sop>" + _WITHOUT_START.replace("IMAGE", "<|begin_of_image|><|image|><|end_of_image|>")
    videos = transformers.Glm4vVideoProcessor(patch_size=8, merge_size=2)
    processor = transformers.Glm4vProcessor(images, tokenizer, videos, chat_template=template)
    return transformers.Glm4vForConditionalGeneration(config), processor


def _molmo2() -> tuple[Any, Any]:
    # The tokens of images are not in the vocabulary of the output head.
    tokenizer = chat_tokenizer(())
    text = _text(tokenizer, head_dim=8, rope_parameters=_ROPE)
    special = "<im_patch> <im_col> <im_start> <low_res_im_start> <frame_start> <im_end> <frame_end> <im_low>".split()
    tokenizer.add_tokens(["<|image|>", "<|video|>", *special], special_tokens=True)
    config = transformers.Molmo2Config(
        text_config={**text, "additional_vocab_size": 16},
        vision_config={**_LAYERS, "image_size": [32, 32], "patch_size": 8},
        adapter_config={**_LAYERS, "vision_feature_layer": [-1, -2], "text_hidden_size": HIDDEN},
        image_patch_id=_ids(tokenizer, "<im_patch>")[0],
    )
    images = transformers.Molmo2ImageProcessor(
        size={"height": 32, "width": 32}, patch_size=8, overlap_margins=[1, 1], max_crops=4, **_MEAN_STD
    )
    videos = transformers.Molmo2VideoProcessor(size={"height": 32, "width": 32}, patch_size=8)
    template = _WITHOUT_START.replace("IMAGE", "<|image|>")
    processor = transformers.Molmo2Processor(images, videos, tokenizer, chat_template=template)
    return transformers.Molmo2ForConditionalGeneration(config), processor


def _minicpmv4_6() -> tuple[Any, Any]:
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    for part in ("image", "slice", "image_id"):
        named |= {f"{part}_start_token": f"<{part}>", f"{part}_end_token": f"</{part}>"}
    tokenizer = chat_tokenizer(tuple(named.values()), **named)
    text = {**_text(tokenizer, model_type="qwen3_5_text"), **_HYBRID}
    markers = {
        f"{name[:-6]}_id": _ids(tokenizer, token)[0] for name, token in named.items()
    }  # MiniCPM-V 4.7 reads them
    config = transformers.MiniCPMV4_6Config(
        text_config=text,
        vision_config={**_VISION, "image_size": 64, "patch_size": 4},
        insert_layer_id=0,
        image_token_id=_ids(tokenizer, "<|image_pad|>")[0],
        video_token_id=_ids(tokenizer, "<|video_pad|>")[0],
        newline_id=tokenizer("\n").input_ids[0],
        **markers,
    )
    size = {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4}
    images = transformers.MiniCPMV4_6ImageProcessor(**size, **_MEAN_STD)
    videos = transformers.MiniCPMV4_6VideoProcessor(**size)
    template = _WITHOUT_START.replace("IMAGE", "<|image_pad|>")
    processor = transformers.MiniCPMV4_6Processor(images, videos, tokenizer, chat_template=template)
    return transformers.MiniCPMV4_6ForConditionalGeneration(config), processor


def tiny_any_chat(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A chat model in eval mode with its processor."""
    torch.manual_seed(seed)
    model, processor = globals()[f"_{name}"]()
    model = _finish(model, processor.tokenizer)
    for module in model.modules():  # near 0, they would hide the image
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            module.weight.data += 1
    return model, processor
