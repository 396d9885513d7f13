"""BLIP-2 and InstructBLIP."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers import AddedToken

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.captioner_loading import register
from hf_captionrl.captioners.fixed_prefix import FixedPrefixCaptioner, configured_ids
from hf_captionrl.captioners.processor_checks import check_special_tokens
from hf_captionrl.captioners.prompt_prefix import repeat_rows

__all__ = ["Blip2Captioner", "Blip2EncoderDecoderCaptioner"]

QFORMER_INPUTS = ("qformer_input_ids", "qformer_attention_mask")


@register
class Blip2Captioner(FixedPrefixCaptioner):
    """BLIP-2 and InstructBLIP with a decoder-only language model (OPT, Vicuna).

    `image_features` are the outputs of the vision tower, before the Q-Former, so that Q-Former and projection can be
    trained. With LoRA, both are trained in full; the queries, which are a parameter and not a module, are then frozen.

    InstructBLIP's Q-Former also reads the prompt.
    """

    family = "blip-2"
    model_types = ("blip-2", "instructblip")
    side_inputs = (*FixedPrefixCaptioner.side_inputs, *QFORMER_INPUTS)
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

    @classmethod
    def for_config(cls, config: Any) -> type[Captioner]:
        return Blip2Captioner if config.use_decoder_only_language_model else Blip2EncoderDecoderCaptioner

    @classmethod
    def complete_processor(cls, model: Any, processor: Any) -> None:
        """Add the image token to a checkpoint that was saved before transformers 4.47."""
        tokenizer, config = processor.tokenizer, model.config
        if config.image_token_id is not None:
            return
        if "<image>" not in tokenizer.get_vocab():
            tokenizer.add_tokens([AddedToken("<image>", normalized=False, special=True)], special_tokens=True)
        config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
        processor.num_query_tokens = config.num_query_tokens
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)

    def check_fit(self) -> None:
        super().check_fit()
        name, image_token_id = type(self.base_model).__name__, self.base_model.config.image_token_id
        known = self.tokenizer.get_vocab().get("<image>")
        if known is None or known != image_token_id:
            raise ValueError(
                f"The token <image> has the id {known} in the tokenizer and {image_token_id} in the configuration of this "
                f"{name}: they do not match. Pass the processor of the model. For checkpoints from before transformers "
                "4.47, set processor.num_query_tokens and model.config.image_token_index, and resize the embeddings."
            )
        if self._reads_prompt and getattr(self.processor, "qformer_tokenizer", None) is None:
            raise ValueError(
                f"The {type(self.processor).__name__} has no qformer_tokenizer, which {name} needs. Pass an InstructBlipProcessor."
            )

    @property
    def _reads_prompt(self) -> bool:
        """Whether the Q-Former reads the prompt."""
        return self.base_model.config.model_type == "instructblip"

    @property
    def writer(self) -> Any:
        return self.base_model.language_model

    def special_token_ids(self) -> tuple[int, int, int]:
        # Generation uses the language model's configuration. OPT ends captions with a newline, not with </s>.
        config, generation = self.base_model.config.text_config, self.base_model.language_model.generation_config
        start = "decoder_start_token_id" if self.is_encoder_decoder else "bos_token_id"
        first, end, pad = configured_ids((start, "eos_token_id", "pad_token_id"), generation, config)
        return self.require_ids(first, end, self.tokenizer.pad_token_id if pad is None else pad)

    def check_tokens(self) -> None:
        # The end token is not checked: OPT ends captions with an ordinary token, the newline.
        check_special_tokens(self.tokenizer, self.base_model, self.start_token_id, None)

    def prefix_token_ids(self) -> list[int]:
        config = self.base_model.config
        return [config.image_token_id] * config.num_query_tokens

    def one_side_input(self) -> dict[str, Tensor]:
        inputs = super().one_side_input()
        if self._reads_prompt:
            read = self.processor.qformer_tokenizer([self.prompt], return_tensors="pt")
            inputs |= {f"qformer_{name}": read[name] for name in ("input_ids", "attention_mask")}
        return inputs

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        native = super().native_inputs(model, inputs)
        if "prefix_ids" in inputs:
            rows = len(inputs["input_ids"])
            native |= {name: repeat_rows(inputs[name], rows) for name in QFORMER_INPUTS if name in inputs}
        return native

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        # A generated <image> would require another image.
        if not self.is_encoder_decoder:
            image_token_id = self.base_model.config.image_token_id
            kwargs["suppress_tokens"] = [*(kwargs.get("suppress_tokens") or []), image_token_id]
        return super().generate_ids(image_features, prompt_ids, side_inputs, **kwargs)


class Blip2EncoderDecoderCaptioner(Blip2Captioner):
    """BLIP-2 and InstructBLIP with an encoder-decoder (Flan-T5), whose encoder reads image and prompt."""

    is_encoder_decoder = True
    token_argument = "decoder_input_ids"

    def prefix_token_ids(self) -> list[int]:
        return [*super().prefix_token_ids(), *self.tokenizer(self.prompt).input_ids]
