"""PaliGemma.

Legend: N captions, T tokens of the text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from packaging import version
from PIL import Image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_captionrl.captioners.captioner import (
    Captioner,
    Encoding,
    blank_image,
    check_chat_processor,
    check_chat_row,
    check_image_size,
    start_token_settings,
)
from hf_captionrl.captioners.head_tap import join_prefix, left_padded, repeat_rows, stack_rows
from hf_captionrl.captioners.loading import register

# --- Chat models with video inputs -----------------------------------------------------------------------------------
# Legend: B videos, F frames per video, M tokens per video, P tokens of the prefix, D features.
#
# Some models have a video token and `get_video_features` (LLaVA-OneVision, Qwen-VL); others read the frames of a video as
# images (InternVL, SmolVLM). The processor decides which one applies; batches are the same for both.

VIDEO_POSITION_INPUTS = ("video_grid_thw", "second_per_grid_ts")
"""Inputs from which Qwen-VL computes the positions of video tokens."""
FRAMES_PER_SECOND = 1.0
"""Frame rate passed to processors for every video, so that the text before the caption is the same for all videos."""


def pixel_kind(model: Any, prefix_ids: Tensor) -> tuple[str, int]:
    """Whether `prefix_ids` `(B, P)` contain video or image tokens, and the id of that token."""
    token = getattr(model.config, "video_token_id", None)
    if token is not None and bool((prefix_ids == token).any()):
        return "video", int(token)
    return "image", int(model.config.image_token_id)


class VideoInputs(Encoding):
    """The part of [`ChatCaptioner`] that prepares videos; `frame_pooling="native"`."""

    processor: Any

    if TYPE_CHECKING:  # members of ChatCaptioner

        def _render(self, kind: str = "image") -> tuple[str, str]: ...

        @property
        def processor_settings(self) -> dict[str, Any]: ...

        def _read(self, found: Any) -> dict[str, Any]: ...

        def _stacked(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]: ...

        def _fixed_or_none(self) -> dict[str, Tensor] | None: ...

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        self.native_frames = 0
        if pooling != "native":
            super().check_frame_pooling(pooling, num_frames)
            return
        name = type(self.base_model).__name__
        if getattr(self.processor, "video_processor", None) is None:
            raise ValueError(
                f"frame_pooling is 'native', but {name} has no video inputs: its {type(self.processor).__name__} has no "
                "video_processor. Use frame_pooling='mean'."
            )
        last = self._prefix_of_video([blank_image()] * num_frames)["input_ids"][-1]
        if last != self.start_token_id:
            raise ValueError(
                f"frame_pooling is 'native', but the chat of {name} ends with token {last} after a video and with token "
                f"{self.start_token_id} after an image. Use a template with the same ending, or frame_pooling='mean'."
            )
        self.native_frames = num_frames
        if self._fixed_or_none() is None:
            self.native_frames = 0
            raise ValueError(
                f"frame_pooling is 'native', but the processor of {name} returns different numbers of tokens for videos of "
                f"{num_frames} frames, so that features alone do not determine its inputs. Set its video_processor to one "
                "size for all videos, or use frame_pooling='mean'."
            )

    def encode_videos(self, videos: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
        return self._stacked([self._prefix_of_video(frames) for frames in videos])

    def video_signature(self) -> str:
        settings = {key: str(value) for key, value in self.processor.video_processor.to_dict().items()}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def _prefix_of_video(self, frames: Sequence[Image.Image]) -> dict[str, Any]:
        """The processor's output for a video and the chat before the caption, like `_prefix_of` for an image."""
        times = {
            "total_num_frames": len(frames),
            "fps": FRAMES_PER_SECOND,
            "duration": len(frames) / FRAMES_PER_SECOND,
            "frames_indices": list(range(len(frames))),
        }
        token = getattr(self.processor, "video_token", None)
        turn = "" if token is None else self._render("video")[0]
        if token is None or turn.count(token) != 1:
            raise ValueError(
                f"frame_pooling is 'native', but the chat template of {type(self.base_model).__name__} does not render "
                f"one video token: {turn!r}. Use a template with content of type 'video', or frame_pooling='mean'."
            )
        found = self.processor(
            text=[turn],
            videos=[[frame.convert("RGB") for frame in frames]],
            video_metadata=[times],
            do_sample_frames=False,
            return_tensors="pt",
            **self.processor_settings,
        )
        if "pixel_values_videos" in found:
            found["pixel_values"] = found.pop("pixel_values_videos")
        return self._read(found)

    def _rows_of_blank_videos(self, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """The side inputs of blank videos with `native_frames` frames, one row per size."""
        pixels = ("pixel_values", "pixel_attention_mask")  # features replace both
        videos = (self.encode_videos([[Image.new("RGB", size)] * self.native_frames]) for size in sizes)
        return [{name: value for name, value in row.items() if name not in pixels} for row in videos]


def as_videos(model: Any, output: Any) -> Any:
    """Features of videos in the form that the model's `get_video_features` returns."""
    if model.config.model_type == "llava_onevision":
        output.pooler_output = torch.stack(output.pooler_output)
    return output


# --- Chat models with image inputs: LLaVA, Qwen-VL, SmolVLM and others -----------------------------------------------
# Legend: B images, N captions, P tokens of the prefix, T tokens of the text, M image tokens (of the image with most),
# D features, L layers with additional features (DeepStack).

PER_IMAGE = ("image_grid_thw", *VIDEO_POSITION_INPUTS, "image_sizes", "pixel_attention_mask")
"""Outputs of processors besides pixels and text that the models need as inputs."""
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names that processors use for token types."""
LISTED = frozenset({"llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types whose forward takes a list of `(M, D)`, one entry per image. Others take `(tiles, tokens, D)`."""
PROBE_SIZES = ((64, 64), (400, 100), (90, 200), (30, 20), (900, 1200))
"""Widths and heights of test images. A processor whose outputs are equal for all of them has one output size."""
_PROBE = "PROBE"


@register
class ChatCaptioner(VideoInputs, Captioner):
    """Chat models of `AutoModelForImageTextToText`: the user's turn contains the image, the caption is the answer.

    The processor determines the text before the caption, the number of tokens per image, and the end of the answer.
    `image_features` are the inputs of the language model, after the connector, which therefore counts as part of the
    vision tower. If images differ in their number of tokens (tiles, native resolution), features are padded and cannot
    be cached for a whole run.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
        processor: Processor of the model with `image_processor`, `tokenizer` and, for chat models, `chat_template`.
        prompt (`str`, *optional*): The user's turn; not part of the text that contains the caption.
    """

    family = "chat"
    model_types: ClassVar[tuple[str, ...]] = (
        "llava",
        "llava_onevision",
        "idefics3",
        "smolvlm",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "internvl",
        "gemma3",
    )
    side_inputs = ("prefix_ids", "prefix_mask", "prefix_types", "image_rows", *PER_IMAGE)
    language_lora = r"model\.(language_model|text_model)\..*\.([qkvo]_proj|gate_proj|up_proj|down_proj)"
    vision_lora = r"model\.(vision_tower|vision_model|visual)\..*\.([qkv]_proj|qkv|fc1|fc2|linear_fc1|linear_fc2|gate_proj|down_proj)"
    default_prompt = "Briefly describe the content of the image."
    processor_class: ClassVar[str | None] = None
    """The only processor class of these models; None if several are possible."""
    towers: ClassVar[tuple[str, ...]] = ("vision_tower", "vision_model", "visual")
    connectors: ClassVar[tuple[str, ...]] = ("multi_modal_projector", "connector", "embed_vision")

    def __init__(self, model: Any, processor: Any, *, prompt: str | None = None) -> None:
        # Caches, with the prompt they were computed for: the rendered chat, and the side inputs of any image.
        self._rendered: tuple[str, tuple[str, str]] | None = None
        self._fixed: tuple[tuple[str, int], dict[str, Tensor] | None] | None = None
        super().__init__(model, processor, prompt=prompt)

    def check_fit(self) -> None:
        super().check_fit()
        model = self.base_model
        check_chat_processor(self.processor, model, self.image_token_id(model), self.processor_class)
        if str(self.processor.image_token) not in self._turns()[0]:
            raise ValueError(
                f"The chat template of the {type(self.processor).__name__} has no image token ({self.processor.image_token}). "
                "Pass the processor of the model, or set its chat_template."
            )

    def check_tokens(self) -> None:
        # The chat template defines how an answer begins and ends.
        return

    def check_image_size(self) -> None:
        row = self._prefix_of(blank_image())
        check_chat_row(row, self.base_model, self.processor)
        check_image_size(self.find_vision_tower(self.base_model), lambda image: row["pixel_values"], self.base_model)

    # Parts of the model

    @classmethod
    def find_vision_tower(cls, model: Any) -> Any:
        found = [getattr(model.model, name) for name in cls.towers if hasattr(model.model, name)]
        if not found:
            raise ValueError(f"{type(model).__name__} has none of {cls.towers}. Use a chat model with a vision tower.")
        return found[0]

    @classmethod
    def connector(cls, model: Any) -> Any:
        """The modules between vision tower and language model.

        Args:
            model (`nn.Module`): The model without PEFT's outermost wrapper.

        Returns:
            `nn.Module`, or None if it is part of the vision tower.
        """
        return next((getattr(model.model, name) for name in cls.connectors if hasattr(model.model, name)), None)

    def freeze_vision(self) -> None:
        super().freeze_vision()
        connector = self.connector(self.base_model)
        if connector is not None:
            connector.requires_grad_(False)
        for value in self.ends_of_rows().values():
            value.requires_grad_(False)

    def vision_state(self) -> dict[str, Tensor]:
        connector = self.connector(self.base_model)
        connected = {} if connector is None else {f"connector.{k}": v for k, v in connector.state_dict().items()}
        return {**super().vision_state(), **connected, **self.ends_of_rows()}

    def ends_of_rows(self) -> dict[str, Tensor]:
        """The vector that LLaVA-OneVision appends to each row of image tokens; part of the features.

        Returns:
            `dict`: From its name to the weight; empty for other models.
        """
        end = getattr(self.base_model.model, "image_newline", None)
        return {} if end is None else {"image_newline": end}

    @classmethod
    def softcap(cls, model: Any) -> float | None:
        # Gemma 3 with images does not apply the soft cap of its configuration.
        return None if model.config.model_type == "gemma3" else super().softcap(model)

    # Text

    @property
    def text_prompt(self) -> str:
        return ""

    @property
    def max_text_tokens(self) -> int:
        fixed = self._fixed_or_none()
        taken = 0 if fixed is None else fixed["prefix_ids"].size(1)
        return super().max_text_tokens - taken

    def special_token_ids(self) -> tuple[int, int, int]:
        config, tokenizer = self.base_model.config.get_text_config(decoder=True), self.tokenizer
        generation = self.base_model.generation_config
        before, answered = self._turns()
        answer = answered[len(before) :] if answered.startswith(before) else _PROBE
        self.lead, _, end = answer.partition(_PROBE)
        ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
        ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
        if tokenizer.eos_token_id not in ends:
            ends.append(tokenizer.eos_token_id)
        own = tokenizer(end, add_special_tokens=False).input_ids[:1] if end.strip() else []
        # The end of an answer in the chat template, unless it is an ordinary word; then the end of any text.
        special = {*ends, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        known = [*(token for token in own if token in special), *ends]
        self._end_ids = tuple(dict.fromkeys(token for token in known if token is not None))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else config.pad_token_id
        start = self._prefix_of(blank_image())["input_ids"][-1]
        return self.require_ids(start, list(self._end_ids), self._end_ids[0] if pad is None else pad)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def _turns(self) -> tuple[str, str]:
        """The chat before the caption, and the chat with a caption (`_PROBE`)."""
        if self._rendered is None or self._rendered[0] != self.prompt:
            self._rendered = (self.prompt, self._render())
        return self._rendered[1]

    def _render(self, kind: str = "image") -> tuple[str, str]:
        if getattr(self.processor, "chat_template", None) is None:
            turn = self.plain_turn()
            if kind == "video":
                turn = turn.replace(self.processor.image_token, self.processor.video_token)
            return turn, turn + _PROBE
        content = [{"type": kind}, {"type": "text", "text": self.prompt}]
        asked = [{"role": "user", "content": content[: 2 if self.prompt else 1]}]
        answered = [*asked, {"role": "assistant", "content": [{"type": "text", "text": _PROBE}]}]
        render = self.processor.apply_chat_template
        return (
            render(asked, add_generation_prompt=True, tokenize=False),
            render(answered, add_generation_prompt=False, tokenize=False),
        )

    def plain_turn(self) -> str:
        """The text before the caption if there is no chat template.

        Returns:
            `str`: The image token and the prompt on separate lines.
        """
        token = self.processor.image_token
        return f"{token}\n{self.prompt}\n" if self.prompt else f"{token}\n"

    # Images

    def _prefix_of(self, image: Image.Image) -> dict[str, Any]:
        """The processor's output for an image and the chat before the caption: lists of ids and types, tensors."""
        return self._read(
            self.processor(text=[self._turns()[0]], images=[image], return_tensors="pt", **self.processor_settings)
        )

    def _read(self, found: Any) -> dict[str, Any]:
        ids = found["input_ids"][0].tolist()
        types = next((found[name][0].tolist() for name in TOKEN_TYPES if name in found), [0] * len(ids))
        tensors = {name: torch.as_tensor(found[name]) for name in ("pixel_values", *PER_IMAGE) if name in found}
        return {"input_ids": ids, "types": types, **tensors}

    @property
    def processor_settings(self) -> dict[str, Any]:
        """Additional arguments for calling the processor."""
        return start_token_settings(self.processor, self._turns()[0])

    def encode_images(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        return self._stacked([self._prefix_of(image.convert("RGB")) for image in images])

    def _stacked(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {"pixel_values": stack_rows([row["pixel_values"] for row in rows])}
        return {**batch, **self._side_inputs(rows)}

    def _side_inputs(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        # The last token before the caption is the start token of the text.
        batch = left_padded([row["input_ids"][:-1] for row in rows], self.pad_token_id)
        batch["prefix_types"] = left_padded([row["types"][:-1] for row in rows], 0)["prefix_ids"]
        batch["image_rows"] = torch.tensor([row["pixel_values"].size(0) for row in rows])
        for name in PER_IMAGE:
            if name in rows[0]:
                batch[name] = stack_rows([row[name] for row in rows])
        return batch

    def _fixed_or_none(self) -> dict[str, Tensor] | None:
        """The side inputs of any image, or any video with `native_frames`, as one row; None if they differ."""
        key = (self.prompt, self.native_frames)
        if self._fixed is None or self._fixed[0] != key:
            first, *others = (
                self._rows_of_blank_videos(PROBE_SIZES)
                if self.native_frames
                else [self._side_inputs([self._prefix_of(Image.new("RGB", size))]) for size in PROBE_SIZES]
            )
            same = all(torch.equal(first[name], other[name]) for other in others for name in first)
            self._fixed = (key, first if same else None)
        return self._fixed[1]

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        fixed = self._fixed_or_none()
        if fixed is None:
            raise ValueError(
                f"{type(self.base_model).__name__} splits images into tiles or keeps their size, so that features alone do "
                "not determine its inputs. Leave out cache_image_features, cache_pixels and image_decoder, or pass a processor with one size "
                "(do_image_splitting=False, crop_to_patches=False, or min_pixels equal to max_pixels with square images)."
            )
        return {name: value.repeat_interleave(number, dim=0) for name, value in fixed.items()}

    # Forward

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        return "prefix_ids" not in inputs

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if "prefix_ids" not in inputs:
            return dict(inputs)
        rows = len(inputs["input_ids"])
        types = repeat_rows(inputs["prefix_types"], rows)
        native = join_prefix(inputs)
        text = cls.text_types(inputs["input_ids"])
        found = inspect.signature(model.forward).parameters
        name = next((name for name in TOKEN_TYPES if name in found), None)
        native = {k: v for k, v in native.items() if k not in cls.side_inputs and k != "pixel_values"}
        if name is not None:
            native[name] = torch.cat([types, text], 1)
        for name in ("image_grid_thw", *VIDEO_POSITION_INPUTS):
            if name in inputs:
                native[name] = repeat_rows(inputs[name], rows).flatten(0, 1)
        native["prefix_ids"] = repeat_rows(inputs["prefix_ids"], rows)
        return native

    @classmethod
    def text_types(cls, input_ids: Tensor) -> Tensor:
        """Token types of the text.

        Args:
            input_ids (`torch.Tensor` of shape `(N, T)`): Token ids of a batch.

        Returns:
            `torch.Tensor` of shape `(N, T)`.
        """
        return torch.zeros_like(input_ids)

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        tower = cls.find_vision_tower(model)
        device, dtype = next((p.device, p.dtype) for p in tower.parameters())
        rows = inputs["image_rows"].tolist()
        kind, token = pixel_kind(model, inputs["prefix_ids"])
        get_features = getattr(model.model, f"get_{kind}_features")
        accepted = inspect.signature(get_features).parameters
        pixels = torch.cat([value[:number] for value, number in zip(inputs["pixel_values"], rows, strict=True)])
        named = {n: inputs[n].flatten(0, 1).to(device) for n in PER_IMAGE if n in inputs and n in accepted}
        output = get_features(pixels.to(device, dtype), **named, return_dict=True)
        counts = (inputs["prefix_ids"] == token).sum(1).tolist()
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        flat = torch.cat([_flat(layer) for layer in layers], -1)  # (sum of M, (1 + L) D)
        if len(flat) != sum(counts):
            raise ValueError(
                f"{type(model).__name__} returned {len(flat)} features for {sum(counts)} {kind} tokens, so processor and "
                "model do not match. Load both from one checkpoint."
            )
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(counts)), batch_first=True)

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        prefix_ids = inputs.pop("prefix_ids")
        kind, token = pixel_kind(model, prefix_ids)
        output = cls.features_output(model, features, (prefix_ids == token).sum(1).tolist())
        inputs["mm_encoder_outputs"] = {kind: as_videos(model, output) if kind == "video" else output}
        yield

    @classmethod
    def features_output(cls, model: Any, features: Tensor, counts: list[int]) -> Any:
        """Features in the form that the model's `get_image_features` returns.

        Args:
            model (`nn.Module`): The model.
            features (`torch.Tensor` of shape `(N, M, (1 + L) D)`): Padded features.
            counts (`list[int]`): Image tokens of each row.

        Returns:
            An output with `pooler_output` and, for models that have them, `deepstack_features`.
        """
        width = model.get_input_embeddings().weight.shape[1]
        layers = [
            [row[:count] for row, count in zip(layer, counts, strict=True)] for layer in features.split(width, dim=-1)
        ]
        if model.config.model_type in LISTED:
            output: Any = BaseModelOutputWithPooling(pooler_output=layers[0])
            if len(layers) > 1:
                output.deepstack_features = layers[1:]
            return output
        # Images may differ in their number of tiles, but all tiles have the same number of tokens.
        return BaseModelOutputWithPooling(pooler_output=torch.cat(layers[0]).unflatten(0, (-1, math.gcd(*counts))))

    @classmethod
    def image_token_id(cls, model: Any) -> int:
        """Id of the image token.

        Args:
            model (`nn.Module`): The model.

        Returns:
            `int`: The id.
        """
        return int(model.config.image_token_id)

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        model = self.base_model
        image_tokens = {self.image_token_id(model), pixel_kind(model, side_inputs["prefix_ids"])[1]}
        suppressed = [*(kwargs.pop("suppress_tokens", None) or []), *sorted(image_tokens)]
        batch = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids), **side_inputs}
        inputs = self.native_inputs(model, batch)
        width = inputs["input_ids"].size(1)
        with self.known_features(model, image_features, inputs):
            ids = model.generate(**inputs, suppress_tokens=suppressed, **kwargs)  # (N, P + T)
        generated = ids[:, width:]
        return torch.cat([repeat_rows(prompt_ids, len(generated)), generated], 1)


def _flat(features: Any) -> Tensor:
    """Features of several images, a list or tensor, as `(sum of M, D)`."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in features])


# --- PaliGemma -------------------------------------------------------------------------------------------------------


@register
class PaliGemmaCaptioner(ChatCaptioner):
    """PaliGemma, with bidirectional attention over image and prompt, and causal attention over the caption."""

    family = "paligemma"
    model_types = ("paligemma",)
    default_prompt = "caption en"
    processor_class = "PaliGemmaProcessor"
    supports_static_cache = False

    def plain_turn(self) -> str:
        return f"{self.processor.image_token}{self.prompt}"

    @classmethod
    def softcap(cls, model: Any) -> float | None:
        # Before transformers 5.23, PaliGemma's forward did not apply the soft cap of its language model.
        applied = version.parse(transformers.__version__) >= version.parse("5.23.0")
        return super().softcap(model) if applied else None

    @classmethod
    def text_types(cls, input_ids: Tensor) -> Tensor:
        # Type 0 has bidirectional attention: here the start token, which is the last token of the prompt.
        types = torch.ones_like(input_ids)
        types[:, 0] = 0
        return types
