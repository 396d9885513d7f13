"""Families that are not chat models: BLIP, BLIP-2, ClipCap, VisionEncoderDecoder, GIT.

Legend: B images, N captions, P tokens of the prefix, T tokens of the text, M image tokens, D features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.clipcap.processing_clipcap import ClipCapProcessor
from hf_captionrl.captioners.head_tap import (
    PREFIX_INPUTS,
    decoder_text,
    join_prefix,
    left_padded,
    repeat_rows,
    split_prefix,
)
from hf_captionrl.captioners.loading import register
from hf_captionrl.captioners.shared_cross_attention import computed_once

logger = logging.getLogger(__name__)


@register
class BlipCaptioner(Captioner):
    """BLIP for captioning (`BlipForConditionalGeneration`), whose decoder attends to the image in cross-attention."""

    family = "blip"
    model_types = ("blip",)
    image_in_cross_attention = True
    can_join_frames = True
    vision_path = "vision_model"
    language_lora = r"text_decoder\.bert\.encoder\..*\.(query|key|value|output\.dense)"
    vision_lora = r"vision_model\.encoder\..*\.(qkv|fc1|fc2)"
    checkpoint_prompts: ClassVar[dict[str, str]] = {"Salesforce/blip-image-captioning": "a picture of "}

    @classmethod
    def output_head(cls, model: Any) -> Any:
        # BlipForConditionalGeneration does not implement get_output_embeddings.
        return model.text_decoder.get_output_embeddings() if hasattr(model, "text_decoder") else None

    def special_token_ids(self) -> tuple[int, int, int]:
        # BLIP does not use its eos_token_id: captions begin with [DEC] and end with [SEP].
        config = self.base_model.config.text_config
        return self.require_ids(config.bos_token_id, config.sep_token_id, config.pad_token_id)

    def own_loss(self, batch: dict[str, Any]) -> Tensor:
        # The configuration may set label smoothing.
        decoder = self.base_model.text_decoder
        smoothing, decoder.label_smoothing = decoder.label_smoothing, 0.0
        try:
            return super().own_loss(batch)
        finally:
            decoder.label_smoothing = smoothing

    @property
    def writer(self) -> Any:
        # Not the model: its generate drops the last token of the prompt, assuming [SEP], and adds a mask for the image.
        return self.base_model.text_decoder

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        ids = self.writer.generate(
            input_ids=prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            encoder_hidden_states=image_features,
            **kwargs,
        )
        return ids[:, prompt_ids.size(1) :]


QFORMER_INPUTS = ("qformer_input_ids", "qformer_attention_mask")


@register
class Blip2Captioner(Captioner):
    """BLIP-2 and InstructBLIP with a decoder-only language model (OPT, Vicuna), which reads image tokens before the text.

    `image_features` are the outputs of the vision tower, before the Q-Former, so that Q-Former and projection can be
    trained. With LoRA, both are trained in full; the queries, which are a parameter and not a module, are then frozen.
    """

    family = "blip-2"
    reads_image_tokens = True
    model_types = ("blip-2", "instructblip")
    side_inputs = (*PREFIX_INPUTS, *QFORMER_INPUTS)
    vision_path = "vision_model"
    connector_paths = ("qformer", "language_projection")
    language_lora = r"language_model\..*\.([qkvo]_proj|out_proj|fc2|down_proj|[qkvo]|wo)"
    vision_lora = r"vision_model\.encoder\..*\.(qkv|fc1|fc2)"
    checkpoint_prompts: ClassVar[dict[str, str]] = {
        "Salesforce/blip2-opt-2.7b-coco": "a photo of",
        "Salesforce/blip2-opt-6.7b-coco": "a photo of",
        "Salesforce/blip2-flan-t5-xl-coco": "a photo of",
        # One of several prompts that it was trained with.
        "Salesforce/instructblip-": "A short image description:",
    }
    _fixed: tuple[str, dict[str, Tensor]] | None = None  # side inputs, with the prompt that they were computed for

    @classmethod
    def for_config(cls, config: Any) -> type[Captioner]:
        return Blip2Captioner if config.use_decoder_only_language_model else Blip2EncoderDecoderCaptioner

    def check_fit(self) -> None:
        # InstructBLIP's Q-Former reads the prompt.
        self.processor_parts = ("qformer_tokenizer",) if self.base_model.config.model_type == "instructblip" else ()
        super().check_fit()

    @property
    def writer(self) -> Any:
        return self.base_model.language_model

    @property
    def text_prompt(self) -> str:
        return "" if self.is_encoder_decoder else self.prompt

    @property
    def max_text_tokens(self) -> int:
        return super().max_text_tokens - (0 if self.is_encoder_decoder else len(self.prefix_token_ids()))

    def special_token_ids(self) -> tuple[int, int, int]:
        # As `generate` reads them, from the language model's configurations. OPT ends captions with a newline, not with </s>.
        config, generation = self.base_model.config.text_config, self.writer.generation_config

        def configured(name: str) -> Any:
            value = getattr(generation, name, None)
            return getattr(config, name, None) if value is None else value

        start = configured("decoder_start_token_id" if self.is_encoder_decoder else "bos_token_id")
        pad = configured("pad_token_id")
        pad = self.tokenizer.pad_token_id if pad is None else pad
        return self.require_ids(start, configured("eos_token_id"), pad)

    def prefix_token_ids(self) -> list[int]:
        """The P token ids before the text, or in the encoder."""
        config = self.base_model.config
        return [config.image_token_id] * config.num_query_tokens

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        if self._fixed is None or self._fixed[0] != self.prompt:
            inputs = left_padded([self.prefix_token_ids()], self.pad_token_id)
            if self.processor_parts:
                read = self.processor.qformer_tokenizer([self.prompt], return_tensors="pt")
                inputs |= {f"qformer_{name}": read[name] for name in ("input_ids", "attention_mask")}
            self._fixed = (self.prompt, inputs)
        return {name: value.repeat_interleave(number, dim=0) for name, value in self._fixed[1].items()}

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        return "prefix_ids" not in inputs or super().is_native(model, inputs)

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if "prefix_ids" not in inputs:
            return dict(inputs)
        native, rows = (split_prefix if cls.is_encoder_decoder else join_prefix)(inputs), len(inputs["input_ids"])
        return native | {name: repeat_rows(inputs[name], rows) for name in QFORMER_INPUTS if name in inputs}


class Blip2EncoderDecoderCaptioner(Blip2Captioner):
    """BLIP-2 and InstructBLIP with an encoder-decoder (Flan-T5), whose encoder reads image and prompt."""

    is_encoder_decoder = True
    reads_image_tokens = False  # those of the encoder
    token_argument = "decoder_input_ids"

    def prefix_token_ids(self) -> list[int]:
        return [*super().prefix_token_ids(), *self.tokenizer(self.prompt).input_ids]


@register
class ClipCapCaptioner(Captioner):
    """ClipCap (`ClipCapForConditionalGeneration`): the language model continues a prefix computed from the image embedding.

    `image_features` are the image embedding, `(B, 1, D)`. With `stop_at_period` in the configuration (or
    `load_captioner(name, stop_at_period=True)`), the end token is the first token that contains a full stop. This
    applies to training, where every caption is made to end with `"."`, to generation and to scoring.
    """

    family = "clipcap"
    model_types = ("clipcap",)
    vision_path = "vision_tower"
    connector_paths = ("mapper",)
    # SR-L and SR-V of No Detail Left Behind. The authors adapt attention of GPT-2, not `mlp.c_proj`, and every linear layer of
    # LLaMA-like models; OPT is ours.
    language_lora = (
        r"language_model\..*\.(attn\.c_attn|attn\.c_proj|[qkvo]_proj|gate_proj|up_proj|down_proj|out_proj|fc2)"
    )
    vision_lora = r"vision_tower\..*\.([qkv]_proj|fc1|fc2)"

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        config = self.base_model.config
        ends = [*config.period_token_ids, self.language_end_id] if config.stop_at_period else [self.eos_token_id]
        return tuple(dict.fromkeys(ends))

    @property
    def max_text_tokens(self) -> int:
        return (
            super().max_text_tokens - self.base_model.config.prefix_length + 1
        )  # the prefix replaces the start token

    def special_token_ids(self) -> tuple[int, int, int]:
        config, tokenizer = self.base_model.config, self.tokenizer
        text, generation = config.text_config, self.base_model.generation_config

        def known(name: str) -> int | None:
            values = (getattr(generation, name), getattr(text, name), getattr(tokenizer, name))
            return next((v[0] if isinstance(v, (list, tuple)) else v for v in values if v is not None), None)

        start, end, pad = (known(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id"))
        start, end, pad = self.require_ids(end if start is None else start, end, end if pad is None else pad)
        self.language_end_id = end
        if config.stop_at_period:
            config.period_token_ids = ClipCapProcessor(self.image_processor, tokenizer).period_token_ids()
            end = config.period_token_ids[0]
        return start, end, pad

    def encode_captions(self, captions: Sequence[str], *, max_length: int | None = 40) -> dict[str, Tensor]:
        if self.base_model.config.stop_at_period:  # the end token is the full stop
            captions = [c.rstrip().rstrip(".") or c if isinstance(c, str) else c for c in captions]
        return super().encode_captions(captions, max_length=max_length)


@register
class EncoderDecoderCaptioner(Captioner):
    """`VisionEncoderDecoderModel`, e.g. ViT + GPT-2 or ViT + BERT."""

    family = "vision-encoder-decoder"
    model_types = ("vision-encoder-decoder",)
    is_encoder_decoder = True
    image_in_cross_attention = True
    can_join_frames = True
    token_argument = "decoder_input_ids"
    vision_path = "encoder"
    connector_paths = ("enc_to_dec_proj",)
    language_lora = r"decoder\..*\.(c_attn|q_attn|(?:cross)?att(?:n|ention)\.c_proj|query|key|value|output\.dense|[qkv]_proj|out_proj)"
    vision_lora = r"encoder\..*\.(query|key|value|qkv|[qkv]_proj|fc1|fc2|intermediate\.dense|\d+\.output\.dense)"

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return decoder_text(inputs)

    def special_token_ids(self) -> tuple[int, int, int]:
        # From the configuration, else the decoder's, else the tokenizer. transformers reads them from the configuration.
        config, tokenizer = self.base_model.config, self.tokenizer
        decoder, generation = config.decoder, self.base_model.generation_config
        candidates: dict[str, tuple[Any, ...]] = {
            "decoder_start_token_id": (decoder.bos_token_id, tokenizer.cls_token_id, tokenizer.bos_token_id),
            "eos_token_id": (decoder.eos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id),
            "pad_token_id": (decoder.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id),
        }
        for name, elsewhere in candidates.items():
            known = [getattr(config, name, None), getattr(generation, name, None)]
            value = next((value for value in (*known, *elsewhere) if value is not None), None)
            if known == [None, None] and value is not None:
                logger.warning("The configuration lacks %s. Using %s, from the decoder or tokenizer.", name, value)
            setattr(config, name, value)
            setattr(generation, name, value)
        return self.require_ids(*(getattr(config, name) for name in candidates))

    def generate_ids(self, image_features: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        mask = torch.ones(image_features.shape[:2], dtype=torch.long, device=image_features.device)
        with computed_once(getattr(self.base_model, "enc_to_dec_proj", None)):
            return super().generate_ids(image_features, *inputs, attention_mask=mask, **kwargs)


@register
class GitCaptioner(Captioner):
    """GIT (`GitForCausalLM`), which reads image tokens and text as one sequence."""

    family = "git"
    model_types = ("git",)
    vision_path = "git.image_encoder"
    connector_paths = ("git.visual_projection",)
    language_lora = r"git\.encoder\..*\.(query|key|value|output\.dense)"
    vision_lora = r"git\.image_encoder\..*\.([qkv]_proj|fc1|fc2)"
