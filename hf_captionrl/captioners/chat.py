"""Chat models with image and video inputs: LLaVA, Qwen-VL, SmolVLM, InternVL, Gemma 3, PaliGemma.

Some models have a video token and `get_video_features` (LLaVA-OneVision, Qwen-VL); others read the frames of a video as
images (InternVL, SmolVLM). The processor decides which one applies; batches are the same for both.

Legend: B images or videos, F frames per video, N captions, P tokens of the prefix, T tokens of the text, M image tokens (of
the image with most), D features, L layers with additional features (DeepStack).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import transformers
from packaging import version
from PIL import Image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_captionrl.captioners.captioner import Captioner, blank_image, start_token_settings
from hf_captionrl.captioners.head_tap import join_prefix, left_padded, repeat_rows, stack_rows
from hf_captionrl.captioners.loading import register
from hf_captionrl.utils.images import to_rgb

# Inputs from which Qwen-VL computes the positions of image and video tokens.
_POSITION_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
# Outputs of processors besides pixels and text that the models need as inputs.
_PER_IMAGE = (*_POSITION_INPUTS, "image_sizes", "pixel_attention_mask")
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # names that processors use for token types
# Model types for which `lists_features` is true.
_LISTED = frozenset({"llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
# Widths and heights of test images. A processor whose outputs are equal for all of them has one output size.
_PROBE_SIZES = ((64, 64), (400, 100), (90, 200), (30, 20), (900, 1200))
_PROBE = "PROBE"  # a caption, to see where the chat template puts it
_FRAMES_PER_SECOND = 1.0  # of every video, so that the text before the caption is the same for all


def _pixel_kind(model: Any, prefix_ids: Tensor) -> tuple[str, int]:
    """Whether `prefix_ids` `(B, P)` contain video or image tokens, and the id of that token."""
    token = getattr(model.config, "video_token_id", None)
    if token not in (None, model.config.image_token_id) and bool((prefix_ids == token).any()):
        return "video", int(token)
    return "image", int(model.config.image_token_id)


def flat_features(output: Any) -> Tensor:
    """`(sum of M, (1 + L) D)` from what `get_image_features` returned."""
    layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    # Each layer is one tensor or a list of one per image.
    parts = [[layer] if isinstance(layer, Tensor) else layer for layer in layers]
    return torch.cat([torch.cat([p.flatten(0, -2) for p in layer]) for layer in parts], -1)


@register
class ChatCaptioner(Captioner):
    """Chat models of `AutoModelForImageTextToText`: the user's turn contains the image, the caption is the answer.

    The processor determines the text before the caption, the number of tokens per image, and the end of the answer.
    `image_features` are the inputs of the language model, after the connector, which therefore counts as part of the
    vision tower. If images differ in their number of tokens (tiles, native resolution), features are padded and cannot
    be cached for a whole run. `prompt` is the user's turn, not part of the text that contains the caption.
    """

    family = "chat"
    model_types: ClassVar[tuple[str, ...]] = (*sorted(_LISTED), "idefics3", "smolvlm", "internvl", "gemma3")
    per_image: ClassVar[tuple[str, ...]] = _PER_IMAGE
    side_inputs: ClassVar[tuple[str, ...]] = ("prefix_ids", "prefix_mask", "prefix_types", "image_rows", *_PER_IMAGE)
    language_lora = r"model\.(language_model|text_model)\..*\.([qkvo]_proj|gate_proj|up_proj|down_proj)"
    vision_lora = r"model\.(vision_tower|vision_model|visual)\..*\.([qkv]_proj|qkv|fc1|fc2|linear_fc1|linear_fc2|gate_proj|down_proj)"
    default_prompt = "Briefly describe the content of the image."
    towers: ClassVar[tuple[str, ...]] = ("vision_tower", "vision_model", "visual")
    connectors: ClassVar[tuple[str, ...]] = ("multi_modal_projector", "connector", "embed_vision")

    # Caches, with the prompt they were computed for: the rendered chat, and the side inputs of any image.
    _rendered: tuple[str, tuple[str, str]] | None = None
    _fixed: tuple[tuple[str, int], dict[str, Tensor] | None] | None = None

    def check_fit(self) -> None:
        super().check_fit()
        expected, own = self.base_model.config.image_token_id, type(self.processor).__name__
        token = getattr(self.processor, "image_token", None)  # a string, or an AddedToken
        known = None if token is None else self.tokenizer.convert_tokens_to_ids(str(token))
        # Gemma 3's image_token is a placeholder of the template, which the processor replaces with the tokenizer's token.
        if token is None or expected not in (known, getattr(self.tokenizer, "image_token_id", None)):
            raise ValueError(
                f"The image token of the {own} is {token} with the id {known}, but {type(self.base_model).__name__} needs "
                f"the id {expected}. Pass the processor of the model, for instance from AutoProcessor.from_pretrained."
            )
        if str(token) not in self._turns()[0]:
            raise ValueError(f"The chat template of the {own} has no image token ({token}). Set its chat_template.")

    def check_tokens(self, end: int | None) -> None:
        """Nothing to check: the chat template defines how an answer begins and ends."""

    # Parts of the model

    @classmethod
    def find_vision_tower(cls, model: Any) -> Any:
        return next(getattr(model.model, name) for name in cls.towers if hasattr(model.model, name))

    def _beside_the_tower(self) -> dict[str, Tensor]:
        """The other weights of the features: the connector, and the vector that LLaVA-OneVision appends to each row."""
        model = self.base_model.model
        connector = next((getattr(model, name) for name in self.connectors if hasattr(model, name)), None)
        weights = {} if connector is None else connector.state_dict(prefix="connector.", keep_vars=True)
        end = getattr(model, "image_newline", None)
        return weights if end is None else {**weights, "image_newline": end}

    def freeze_vision(self) -> None:
        super().freeze_vision()
        for value in self._beside_the_tower().values():
            value.requires_grad_(False)

    def vision_state(self) -> dict[str, Tensor]:
        return {**super().vision_state(), **self._beside_the_tower()}

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
        return super().max_text_tokens - (0 if fixed is None else fixed["prefix_ids"].size(1))

    def special_token_ids(self) -> tuple[int, int, int]:
        config, tokenizer = self.base_model.config.get_text_config(decoder=True), self.tokenizer
        generation = self.base_model.generation_config
        before, answered = self._turns()
        answer = answered[len(before) :] if answered.startswith(before) else _PROBE
        self.lead, _, end = answer.partition(_PROBE)
        ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
        ends = [*(ends if isinstance(ends, (list, tuple)) else [ends]), tokenizer.eos_token_id]
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
            turn = turn.replace(self.processor.image_token, self.processor.video_token) if kind == "video" else turn
            return turn, turn + _PROBE
        content = [{"type": kind}, {"type": "text", "text": self.prompt}]
        asked = [{"role": "user", "content": content[: 2 if self.prompt else 1]}]
        answered = [*asked, {"role": "assistant", "content": [{"type": "text", "text": _PROBE}]}]
        # Templates of reasoning models then close the reasoning; for others, transformers warns of the setting.
        thinks = {"enable_thinking": False} if "enable_thinking" in str(self.processor.chat_template) else {}
        render = functools.partial(self.processor.apply_chat_template, tokenize=False, **thinks)
        return render(asked, add_generation_prompt=True), render(answered, add_generation_prompt=False)

    def plain_turn(self) -> str:
        """The text before the caption if there is no chat template: image token and prompt on separate lines."""
        token = self.processor.image_token
        return f"{token}\n{self.prompt}\n" if self.prompt else f"{token}\n"

    # Images

    def _prefix_of(self, image: Image.Image) -> dict[str, Any]:
        """The processor's output for an image and the chat before the caption: lists of ids and types, tensors."""
        return self._read(text=[self._turns()[0]], images=[to_rgb(image)])

    def _read(self, **inputs: Any) -> dict[str, Any]:
        settings = start_token_settings(self.processor, self._turns()[0])
        found = self.processor(**inputs, return_tensors="pt", **settings)
        if "pixel_values_videos" in found:
            found["pixel_values"] = found.pop("pixel_values_videos")
        ids = found["input_ids"][0].tolist()
        types = next((found[name][0].tolist() for name in _TOKEN_TYPES if name in found), [0] * len(ids))
        tensors = {name: torch.as_tensor(found[name]) for name in ("pixel_values", *self.per_image) if name in found}
        return {"input_ids": ids, "types": types, **tensors}

    def encode_images(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        return self._stacked([self._prefix_of(image) for image in images])

    def _stacked(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        return {"pixel_values": stack_rows([row["pixel_values"] for row in rows]), **self._side_inputs(rows)}

    def _side_inputs(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        # The last token before the caption is the start token of the text.
        batch = left_padded([row["input_ids"][:-1] for row in rows], self.pad_token_id)
        batch["prefix_types"] = left_padded([row["types"][:-1] for row in rows], 0)["prefix_ids"]
        batch["image_rows"] = torch.tensor([row["pixel_values"].size(0) for row in rows])
        for name in self.per_image:
            if name in rows[0]:
                batch[name] = stack_rows([row[name] for row in rows])
        return batch

    def _fixed_or_none(self) -> dict[str, Tensor] | None:
        """The side inputs of any image, or any video with `native_frames`, as one row; None if they differ."""
        key = (self.prompt, self.native_frames)
        if self._fixed is None or self._fixed[0] != key:
            rows = []
            for image in (Image.new("RGB", size) for size in _PROBE_SIZES):
                frames = [image] * self.native_frames
                read = self._prefix_of_video(frames) if frames else self._prefix_of(image)
                rows.append(self._side_inputs([read]))
                if frames:
                    rows[-1].pop("pixel_attention_mask", None)  # features replace it
            same = all(torch.equal(rows[0][name], row[name]) for row in rows[1:] for name in rows[0])
            self._fixed = (key, rows[0] if same else None)
        return self._fixed[1]

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        fixed = self._fixed_or_none()
        if fixed is None:
            raise ValueError(
                f"{type(self.base_model).__name__} splits images into tiles or keeps their size, so that features alone do not determine "
                "its inputs. Leave out cache_image_features and cache_pixels, or pass a processor with one size "
                "(do_image_splitting=False, crop_to_patches=False, or min_pixels equal to max_pixels with square images)."
            )
        return {name: value.repeat_interleave(number, dim=0) for name, value in fixed.items()}

    # Videos, `frame_pooling="native"`

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        self.native_frames = 0
        if pooling != "native":
            super().check_frame_pooling(pooling, num_frames)
            return
        if getattr(self.processor, "video_processor", None) is None:
            reason = f"the {type(self.processor).__name__} has no video_processor"
        elif (last := self._prefix_of_video([blank_image()] * num_frames)["input_ids"][-1]) != self.start_token_id:
            reason = (
                f"its chat ends with token {last} after a video and with token {self.start_token_id} after an image"
            )
        else:
            self.native_frames = num_frames
            if self._fixed_or_none() is not None:
                return
            self.native_frames = 0
            reason = f"its processor returns different numbers of tokens for videos of {num_frames} frames"
        raise ValueError(
            f"frame_pooling is 'native', but {type(self.base_model).__name__} does not support it: {reason}. Change the processor "
            "(one size for all videos, a template with one ending), or use frame_pooling='mean'."
        )

    def encode_videos(self, videos: Sequence[Sequence[Image.Image]]) -> dict[str, Tensor]:
        return self._stacked([self._prefix_of_video(frames) for frames in videos])

    def video_signature(self) -> str:
        settings = {key: str(value) for key, value in self.processor.video_processor.to_dict().items()}
        return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()

    def _prefix_of_video(self, frames: Sequence[Image.Image]) -> dict[str, Any]:
        """The processor's output for a video and the chat before the caption, like `_prefix_of` for an image."""
        times = {
            "total_num_frames": len(frames),
            "fps": _FRAMES_PER_SECOND,
            "duration": len(frames) / _FRAMES_PER_SECOND,
            "frames_indices": list(range(len(frames))),
        }
        token = getattr(self.processor, "video_token", None)
        turn = "" if token is None else self._render("video")[0]
        if token is None or turn.count(token) != 1:
            raise ValueError(
                f"frame_pooling is 'native', but the chat template of {type(self.base_model).__name__} does not render "
                f"one video token: {turn!r}. Use a template with content of type 'video', or frame_pooling='mean'."
            )
        return self._read(text=[turn], videos=[[*map(to_rgb, frames)]], video_metadata=[times], do_sample_frames=False)

    # Forward

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        return "prefix_ids" not in inputs

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        if "prefix_ids" not in inputs:
            return dict(inputs)
        rows = len(inputs["input_ids"])
        left_out = {*cls.side_inputs, "pixel_values"}
        native = {name: value for name, value in join_prefix(inputs).items() if name not in left_out}
        accepted = inspect.signature(model.forward).parameters
        for name in [name for name in _TOKEN_TYPES if name in accepted][:1]:
            types = repeat_rows(inputs["prefix_types"], rows)
            native[name] = torch.cat([types, cls.text_types(inputs["input_ids"])], 1)
        for name in _POSITION_INPUTS:
            if name in inputs:
                native[name] = repeat_rows(inputs[name], rows).flatten(0, 1)
        native["prefix_ids"] = repeat_rows(inputs["prefix_ids"], rows)
        return native

    @classmethod
    def text_types(cls, input_ids: Tensor) -> Tensor:
        """Token types `(N, T)` of the text `(N, T)`."""
        return torch.zeros_like(input_ids)

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        tower = cls.find_vision_tower(model)
        device, dtype = next((p.device, p.dtype) for p in tower.parameters())
        rows = inputs["image_rows"].tolist()
        kind, token = _pixel_kind(model, inputs["prefix_ids"])
        get_features = getattr(model.model, f"get_{kind}_features")
        accepted = inspect.signature(get_features).parameters
        pixels = torch.cat([value[:number] for value, number in zip(inputs["pixel_values"], rows, strict=True)])
        named = {n: inputs[n].flatten(0, 1).to(device) for n in _PER_IMAGE if n in inputs and n in accepted}
        output = get_features(pixels.to(device, dtype), **named, return_dict=True)
        counts = (inputs["prefix_ids"] == token).sum(1).tolist()
        return cls.padded_features(model, flat_features(output), counts, kind)

    @staticmethod
    def padded_features(model: Any, flat: Tensor, counts: list[int], kind: str = "image") -> Tensor:
        """`(sum of M, D)` -> `(B, M, D)` for images with `counts` tokens."""
        if len(flat) != sum(counts):
            raise ValueError(
                f"{type(model).__name__} returned {len(flat)} features for {sum(counts)} {kind} tokens, so processor and "
                "model do not match. Load both from one checkpoint."
            )
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(counts)), batch_first=True)

    @classmethod
    def lists_features(cls, model: Any) -> bool:
        """Whether the forward takes a list of `(M, D)`, one entry per image, instead of `(tiles, tokens, D)`."""
        return model.config.model_type in _LISTED

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        # Padded features `(N, M, (1 + L) D)` in the form that `get_image_features` or `get_video_features` returns.
        prefix_ids = inputs.pop("prefix_ids")
        kind, token = _pixel_kind(model, prefix_ids)
        counts = (prefix_ids == token).sum(1).tolist()
        layers: list[Any] = [
            [row[:count] for row, count in zip(layer, counts, strict=True)]
            for layer in features.split(model.get_input_embeddings().weight.shape[1], dim=-1)
        ]
        if not cls.lists_features(model):
            # Images may differ in their number of tiles, but all tiles have the same number of tokens.
            layers[0] = torch.cat(layers[0]).unflatten(0, (-1, math.gcd(*counts)))
        elif kind == "video" and model.config.model_type == "llava_onevision":
            layers[0] = torch.stack(layers[0])
        output: Any = BaseModelOutputWithPooling(pooler_output=layers[0])
        if len(layers) > 1:
            output.deepstack_features = layers[1:]
        inputs["mm_encoder_outputs"] = {kind: output}
        yield

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        # A generated image token would require another image.
        tokens = {self.base_model.config.image_token_id, _pixel_kind(self.base_model, side_inputs["prefix_ids"])[1]}
        kwargs["suppress_tokens"] = [*(kwargs.get("suppress_tokens") or []), *sorted(tokens)]
        return super().generate_ids(image_features, prompt_ids, side_inputs, **kwargs)


@register
class PaliGemmaCaptioner(ChatCaptioner):
    """PaliGemma, with bidirectional attention over image and prompt, and causal attention over the caption."""

    family = "paligemma"
    model_types = ("paligemma",)
    default_prompt = "caption en"
    supports_static_cache = False

    def check_fit(self) -> None:
        super().check_fit()
        if not isinstance(self.processor, transformers.PaliGemmaProcessor):  # others run, with other texts
            raise ValueError(f"PaliGemma needs a PaliGemmaProcessor, not a {type(self.processor).__name__}. Pass one.")

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
