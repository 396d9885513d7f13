"""ClipCap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.processor_checks import check_special_tokens
from hf_captionrl.models.clipcap.processing_clipcap import ClipCapProcessor

__all__ = ["ClipCapCaptioner"]


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
        if not config.stop_at_period:
            return (self.eos_token_id,)
        return tuple(dict.fromkeys([*config.period_token_ids, self.language_end_id]))

    @property
    def max_text_tokens(self) -> int:
        # The prefix replaces the start token.
        return super().max_text_tokens - self.base_model.config.prefix_length + 1

    def special_token_ids(self) -> tuple[int, int, int]:
        config, tokenizer = self.base_model.config, self.tokenizer
        text, generation = config.text_config, self.base_model.generation_config

        def known(name: str) -> int | None:
            values = (getattr(generation, name), getattr(text, name), getattr(tokenizer, name))
            return next((v[0] if isinstance(v, (list, tuple)) else v for v in values if v is not None), None)

        start, end = known("bos_token_id"), known("eos_token_id")
        pad = known("pad_token_id")
        start, end, pad = self.require_ids(end if start is None else start, end, end if pad is None else pad)
        self.language_end_id = end
        if config.stop_at_period:
            pair = ClipCapProcessor(self.image_processor, tokenizer)
            config.period_token_ids = pair.period_token_ids()
            end = config.period_token_ids[0]
        return start, end, pad

    def check_tokens(self) -> None:
        # Check the language model's end token, not the full stop, which is an ordinary token.
        check_special_tokens(self.tokenizer, self.base_model, self.start_token_id, self.language_end_id)

    def encode_captions(self, captions: Sequence[str], *, max_length: int = 40) -> dict[str, Tensor]:
        if self.base_model.config.stop_at_period:  # the end token is the full stop
            captions = [c.rstrip().rstrip(".") or c if isinstance(c, str) else c for c in captions]
        return super().encode_captions(captions, max_length=max_length)

    @classmethod
    def softcap(cls, model: Any) -> float | None:
        return getattr(model.config.text_config, "final_logit_softcapping", None)
