"""The common interface of all captioners: encode, score, generate, adapt, save.

Legend: B images or captions, N = B * captions per image, P tokens of start and prompt, T tokens, V vocabulary, D features,
M image tokens, H x W the input size of the vision tower.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import PIL
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList

from hf_captionrl.captioners.decoding import DecodingLoop, FirstTokens, UndecodableError
from hf_captionrl.captioners.head_tap import (
    LogProbsObjective,
    bypass_vision_tower,
    evaluating,
    first_rows,
    floating_dtype,
    mean_cross_entropy,
    tap_head,
)
from hf_captionrl.captioners.shared_cross_attention import fold_cross_attention
from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX
from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import find_file, read_object
from hf_captionrl.utils.versions import is_word_piece

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Tune = Literal["language", "vision", "both"]

# --- Captions to token ids with prompt and labels --------------------------------------------------------------------


def start_token_settings(processor: Any, chat: str) -> dict[str, Any]:
    """Settings that prevent a processor from writing the start token of a chat twice."""
    start = getattr(getattr(processor, "tokenizer", processor), "bos_token", None)
    templated = getattr(processor, "chat_template", None) is not None
    return {"add_special_tokens": False} if templated and start and chat.startswith(start) else {}


def completion_mask(ids: Tensor, *, end_ids: Sequence[int], pad_id: int) -> tuple[Tensor, Tensor]:
    """Mask `(B, T)` of generated `ids` up to and including the first end token, and whether there is one `(B,)`."""
    is_end = torch.isin(ids, torch.tensor(list(end_ids), device=ids.device))  # (B, T)
    mask = is_end.cumsum(1) - is_end.long() == 0
    if pad_id not in end_ids:  # rows without an end token are padded too
        mask &= ((ids != pad_id).flip(1).cumsum(1) > 0).flip(1)
    return mask, is_end.any(1)


# --- An image processor in two parts: images to 8-bit pixels, and pixels to inputs of the vision tower ---------------

_REFUSAL = "The image processor cannot be split. Leave out cache_pixels, because "
_ONLY_RESIZED: dict[str, Any] = {"do_rescale": False, "do_normalize": False}
_ONLY_SCALED: dict[str, Any] = {
    **dict.fromkeys(("do_resize", "do_center_crop", "do_pad", "do_convert_rgb"), False),
    "input_data_format": "channels_first",
}


def processor_settings(image_processor: Any) -> str:
    """All settings of an image processor as JSON, with its class: those of Pillow and torchvision round differently."""
    settings = {key: str(value) for key, value in image_processor.to_dict().items()}
    return json.dumps({**settings, "class": type(image_processor).__name__}, sort_keys=True)


class PreparedPixels:
    """The two parts of an image processor.

    They are compared with `encode`, the captioner's own `pixel_values`, on noise images, and refused unless bit-identical.
    """

    def __init__(self, processor: Any, encode: Callable[[Sequence[Image.Image]], Tensor]) -> None:
        self.processor = processor
        noise, sizes = np.random.default_rng(0), ((64, 64), (400, 100), (90, 200), (30, 20))
        probes = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
        whole = encode(probes)
        self.row_shape = whole.shape[1:]
        rows = [self.prepare(torch.from_numpy(np.array(image)).permute(2, 0, 1)) for image in probes]
        self.shape = tuple(rows[0].shape)  # (3, H, W)
        if len({row.shape for row in rows}) > 1 or self.row_shape.numel() != rows[0].numel():
            raise ValueError(_REFUSAL + "it returns tiles or keeps the size of an image")
        if not torch.equal(self.normalise(rows), whole):
            raise ValueError(_REFUSAL + "it changes pixels after normalising them")

    @property
    def signature(self) -> str:
        """Hash of all that determines the pixels."""
        parts = [processor_settings(self.processor), PIL.__version__, torchvision.__version__, str(self.shape)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    def prepare(self, image: Any) -> Tensor:
        """`(3, H, W)` uint8: the image as the vision tower reads it, before it is rescaled and normalised."""
        found = self.processor(images=[image], **_ONLY_RESIZED, return_tensors="pt")["pixel_values"]
        pixels = found.to(torch.uint8).flatten(0, -4).squeeze(0)
        if found.dtype != torch.uint8 and not (pixels == found).all():  # processors that pad return whole floats
            raise ValueError(_REFUSAL + "it does more with pixels than resize and crop them")
        return pixels

    def normalise(self, pixels: Sequence[Tensor]) -> Tensor:
        """B tensors `(3, H, W)`, uint8 -> `pixel_values`."""
        rows = self.processor(images=list(pixels), **_ONLY_SCALED, return_tensors="pt")["pixel_values"]
        return rows.view(-1, *self.row_shape)


# --- Models that FSDP2 shards ----------------------------------------------------------------------------------------


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 shards the model."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _with_gathered_weights(model: Any, function: Callable[[], Result]) -> Result:
    """Call a function as if it were the model's forward, so that FSDP2 gathers the outermost weights for it.

    Generation and image encoding call submodules directly, while FSDP2 gathers these weights in forward only.
    """
    if not is_sharded(model):
        return function()
    from torch.distributed.fsdp import register_fsdp_forward_method

    model.call_gathered = types.MethodType(lambda self: function(), model)
    register_fsdp_forward_method(model, "call_gathered")
    try:
        return model.call_gathered()
    finally:
        del model.call_gathered


# --- Settings that are saved beside model and processor --------------------------------------------------------------

SETTINGS_FILE = "captioner.json"
"""File of the settings that belong to neither model nor processor."""


def read_settings(name: str, revision: str | None) -> dict[str, Any]:
    """Read the settings that a captioner was saved with."""
    file = find_file(name, SETTINGS_FILE, revision)
    return {} if file is None else read_object(file)


@dataclass
class ProcessorPair:
    """An image processor and a tokenizer of transformers, for families without a joint processor."""

    image_processor: Any
    tokenizer: Any

    def save_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save both into one folder."""
        self.image_processor.save_pretrained(folder, **kwargs)
        self.tokenizer.save_pretrained(folder, **kwargs)


# --- Generated captions ----------------------------------------------------------------------------------------------


@dataclass
class Completions:
    """Generated captions.

    Args:
        ids (`torch.Tensor` of shape `(N, T)`): Token ids after the prompt, including the end token, right-padded.
        captions (`list[str]`): N captions without prompt and special tokens.
        ended (`torch.Tensor` of shape `(N,)`): Whether the caption has an end token; if not, it was truncated.
        mask (`torch.Tensor` of shape `(N, T)`): True for the tokens of the caption, including the end token.
    """

    ids: Tensor
    captions: list[str]
    ended: Tensor
    mask: Tensor

    def rows(self, index: Tensor) -> Completions:
        """The captions in the rows `index` `(K,)`, without the columns that only the others use."""
        mask = self.mask[index]
        width = max(1, int(mask.any(0).sum()))
        captions = [self.captions[row] for row in index.tolist()]
        return Completions(self.ids[index][:, :width], captions, self.ended[index], mask[:, :width])


def split_greedy(together: Completions, group_size: int) -> tuple[Completions, Completions]:
    """Split the result of `generate(greedy_first=True)` into the G captions and the greedy caption of each image."""
    rows = torch.arange(len(together.captions))
    is_greedy = rows % (group_size + 1) == 0
    return together.rows(rows[~is_greedy]), together.rows(rows[is_greedy])


# --- The captioner ---------------------------------------------------------------------------------------------------


class Captioner:
    """A vision-to-text model with its processor, with the same interface for every family.

    All families use the same batches: `input_ids` (start, prompt, caption, end), `attention_mask` and `labels`, with
    `pixel_values` or `image_features`. Labels equal `input_ids` where supervised, and are not shifted. The model and
    its wrappers take such a batch and a `head_objective` (see `captioners.head_tap`).

    A family is a subclass that sets the class attributes and overrides the methods that its models need.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model; its `forward` is extended in place.
        processor: A processor with `image_processor` and `tokenizer`.
        prompt (`str`, *optional*): Text before every caption, in training and generation; never supervised.

    Raises:
        ValueError: If the model has no output head, the tokenizer does not match it, or a special token is missing.
    """

    family: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    model_class: ClassVar[str] = "AutoModelForImageTextToText"  # of transformers, which loads a checkpoint
    is_encoder_decoder: ClassVar[bool] = False
    token_argument: ClassVar[str] = "input_ids"  # name of the decoder's token ids in the model's forward
    # Whether the text sees the image only through cross-attention, so that captions of an image can share its keys.
    image_in_cross_attention: ClassVar[bool] = False
    vision_path: ClassVar[str] = ""  # of the vision tower, whose `last_hidden_state` is `image_features`
    connector_paths: ClassVar[tuple[str, ...]] = ()  # of the modules between vision tower and language model
    # From prefixes of names on the Hub to the prompts that these checkpoints were trained with; and the prompt of all others.
    checkpoint_prompts: ClassVar[dict[str, str]] = {}
    default_prompt: ClassVar[str] = ""
    processor_parts: tuple[str, ...] = ()  # that it needs besides `image_processor` and `tokenizer`
    side_inputs: ClassVar[tuple[str, ...]] = ()  # names of the inputs besides the pixels with one row per image
    reads_image_tokens: ClassVar[bool] = False  # whether tokens of the decoder's text stand for the image
    can_join_frames: ClassVar[bool] = False  # whether it accepts the concatenated image tokens of several frames
    # Regular expressions for the full names of the modules of language model and vision tower that get LoRA.
    language_lora: ClassVar[str] = ""
    vision_lora: ClassVar[str] = ""
    lead: str = ""  # separator between a caption and the text before it, if the prompt does not define it
    frame_pooling: str = "mean"  # in training, see `check_frame_pooling`; saved if the model was trained on videos
    num_frames: int = 0  # frames per video in training; 0 if the model was trained on images
    own_loop: bool = True  # whether captions are decoded by the package's loop where it applies
    _prepared: PreparedPixels | None = None

    def __init__(self, model: nn.Module, processor: Any, *, prompt: str | None = None) -> None:
        self.model: Any = model
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor
        self.prompt = self.default_prompt if prompt is None else prompt
        self.check_fit()
        self.start_token_id, self.eos_token_id, self.pad_token_id = self.special_token_ids()
        used = 1 + max(*self.tokenizer.get_vocab().values(), *self.end_token_ids)
        # Of an output head with rows beyond the tokenizer, only this many ids are generated; None: all.
        self.num_tokens = used if used < self.vocab_size else None
        tap_head(self.base_model, type(self))
        if self.image_in_cross_attention and not self.base_model.folds_cross_attention:
            self.base_model.folds_cross_attention = fold_cross_attention(self.base_model)

    # Model, tokenizer and processor: overridden by families

    @classmethod
    def for_config(cls, config: Any) -> type[Captioner]:
        """The class for the configuration of a checkpoint, for model types that need several classes."""
        return cls

    def check_loaded(self) -> None:
        """Raise if the loaded model does not compute what this interface needs: only for types that no test covers."""

    @classmethod
    def known_prompt(cls, name: str) -> str:
        """The prompt that a published checkpoint was trained with; `default_prompt` for unknown names."""
        known = (prompt for start, prompt in cls.checkpoint_prompts.items() if name.startswith(start))
        return next(known, cls.default_prompt)

    @classmethod
    def output_head(cls, model: Any) -> Any:
        """The output projection, possibly wrapped by PEFT, of the model without PEFT's outermost wrapper; or None."""
        return model.get_output_embeddings()

    @classmethod
    def softcap(cls, model: Any) -> float | None:
        """Soft cap of the logits, if the model has one."""
        return getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)

    @classmethod
    def find_vision_tower(cls, model: Any) -> Any:
        """The vision tower: its `last_hidden_state` for `pixel_values` is `(B, M, D)`."""
        return model.get_submodule(cls.vision_path)

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute `image_features` `(B, M, D)` from the output of `encode_images`."""
        tower, pixels = cls.find_vision_tower(model), inputs["pixel_values"]
        device, dtype = next(((p.device, p.dtype) for p in tower.parameters()), (pixels.device, pixels.dtype))
        return tower(pixels.to(device, dtype)).last_hidden_state

    @classmethod
    def is_native(cls, model: Any, inputs: dict[str, Any]) -> bool:
        """Whether a batch with images already has the form of the model's forward: by default, one image per caption."""
        pixels = inputs["pixel_values"]
        ids: Any = inputs.get("input_ids", inputs.get(cls.token_argument))
        return pixels.dim() != 4 or pixels.size(0) == ids.size(0)

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Convert a batch from `collate` to arguments of the model's original forward; leave those as they are."""
        return dict(inputs)

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        """Context in which the model uses the output of `encode` instead of images.

        `features` has one row per caption, or one per image if cross-attention is folded. `inputs`, those of the original
        forward, are modified in place.
        """
        with bypass_vision_tower(cls.find_vision_tower(model), features) as placeholder:
            inputs["pixel_values"] = placeholder
            yield

    def generate_ids(
        self, image_features: Tensor, prompt_ids: Tensor, side_inputs: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        """The ids `(N, T)` that the model's `generate` writes after `prompt_ids` `(B, P)`."""
        model = self.base_model
        if self.reads_image_tokens:  # a generated image token would require another image
            kwargs["suppress_tokens"] = [*(kwargs.get("suppress_tokens") or []), model.config.image_token_id]
        batch = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids), **side_inputs}
        inputs = self.native_inputs(model, batch)
        if self.is_encoder_decoder:
            inputs.pop("decoder_attention_mask")
            inputs["decoder_input_ids"] = prompt_ids  # with the last one, which a forward with labels does not read
        width = inputs[self.token_argument].size(1)
        with self.known_features(model, image_features, inputs):
            return model.generate(**inputs, **kwargs)[:, width:]

    def check_fit(self) -> None:
        """Raise if the model has no output head, or if tokenizer or processor do not match it."""
        name, head = type(self.base_model).__name__, self.output_head(self.base_model)
        lacking = [part for part in self.processor_parts if getattr(self.processor, part, None) is None]
        if lacking:
            raise ValueError(f"The processor has no {' and no '.join(lacking)}. Pass the processor of {name}.")
        if head is None:
            raise ValueError(f"{name} has no output head. Load the checkpoint with its language-modelling head.")
        if len(self.tokenizer) > head.out_features:
            sizes = f"has {len(self.tokenizer)} tokens, but the model's output head has {head.out_features}"
            raise ValueError(f"The tokenizer {sizes}. Pass the processor of {name}.")

    def special_token_ids(self) -> tuple[int, int, int]:
        """Ids of the start, end and padding tokens."""
        config = self.base_model.config
        return self.require_ids(config.bos_token_id, config.eos_token_id, config.pad_token_id)

    def require_ids(self, start: Any, end: Any, pad: Any) -> tuple[int, int, int]:
        """The three special tokens, of lists the first one; raises if one is missing."""
        named = {"start": start, "end": end, "padding": pad}
        ids = [value[0] if isinstance(value, (list, tuple)) and value else value for value in named.values()]
        missing = [name for name, value in zip(named, ids, strict=True) if not isinstance(value, int)]
        if missing:
            raise ValueError(f"The model has no {' and '.join(missing)} token. Set their ids in model.config.")
        return ids[0], ids[1], ids[2]

    @property
    def base_model(self) -> Any:
        """The model inside PEFT's wrapper, whose `forward` is extended."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def writer(self) -> Any:
        """The module whose `generate` decodes."""
        return self.base_model

    @property
    def vision_tower(self) -> Any:
        """The vision tower."""
        return self.find_vision_tower(self.base_model)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def use_full_logits(self) -> bool:
        """Whether full logits are computed: slower, but correct for models whose head cannot be tapped."""
        return self.base_model.use_full_logits

    @use_full_logits.setter
    def use_full_logits(self, value: bool) -> None:
        self.base_model.use_full_logits = value

    @property
    def vocab_size(self) -> int:
        """Rows of the output projection."""
        return self.output_head(self.base_model).out_features

    @property
    def max_text_tokens(self) -> int:
        """Longest text that the model has positions for, in tokens, including start token and prompt."""
        config = self.base_model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", None) or 2**20)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generated caption; the first one, `eos_token_id`, ends captions in training."""
        return (self.eos_token_id,)

    @property
    def image_inputs(self) -> tuple[str, ...]:
        """Names of the image inputs of a batch; each has one row per image."""
        return ("pixel_values", "image_features", *self.side_inputs)

    @property
    def text_prompt(self) -> str:
        """The part of the prompt that is in the same sequence as the caption."""
        return self.prompt

    def prompt_ids(self) -> list[int]:
        """Token ids before every caption: the start token and the prompt."""
        return [self.start_token_id, *self._own_prompt_ids()]

    def _own_prompt_ids(self) -> list[int]:
        text = self.text_prompt.rstrip(" ")  # byte-level tokens begin, not end, with the space
        return list(self.tokenizer(text, add_special_tokens=False).input_ids) if text else []

    # Images and videos

    def encode_images(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Prepare B images: `pixel_values` `(B, 3, H, W)` (chat models: `(B, tiles, ...)`), and the `side_inputs`."""
        pixels = self.image_processor(images=[*map(to_rgb, images)], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, **self.fixed_side_inputs(len(images))}

    @property
    def prepared_pixels(self) -> PreparedPixels:
        """The image processor in two parts; raises ValueError, with the reason, if it cannot be split."""
        if self._prepared is None or self._prepared.processor is not self.image_processor:
            self.fixed_side_inputs(1)  # raises if inputs besides the pixels depend on the image
            encode = lambda images: self.encode_images(images)["pixel_values"]  # noqa: E731
            self._prepared = PreparedPixels(self.image_processor, encode)
        return self._prepared

    def prepare_pixels(self, images: Sequence[Image.Image]) -> Tensor:
        """Resize and crop images as the vision tower reads them, without rescaling and normalising: `(B, 3, H, W)` uint8."""
        return torch.stack([self.prepared_pixels.prepare(to_rgb(image)) for image in images])

    def encode_pixels(self, pixels: Sequence[Tensor]) -> dict[str, Tensor]:
        """Prepare B rows of `prepare_pixels` for the model; the result is bit-exactly that of `encode_images`."""
        return {"pixel_values": self.prepared_pixels.normalise(pixels), **self.fixed_side_inputs(len(pixels))}

    def encode_inputs(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """`encode_images`, or `encode_pixels` if the images are rows of `prepare_pixels`."""
        return self.encode_pixels(images) if isinstance(images[0], Tensor) else self.encode_images(images)

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        """The `side_inputs` of `number` images; raises ValueError if they depend on the image, not only on the features."""
        return {}

    def fixed_side_inputs_missing_in(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """`fixed_side_inputs` for inputs that have `pixel_values` or `image_features`, but no side inputs."""
        if not self.side_inputs or any(name in inputs for name in self.side_inputs):
            return {}
        return self.fixed_side_inputs(len(inputs["image_features" if "image_features" in inputs else "pixel_values"]))

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        """Raise if the model does not support a frame pooling of videos, see `data.pool_frames`."""
        if pooling != "mean" and not self.can_join_frames:
            name = type(self.base_model).__name__
            reason = f"{name} accepts the image tokens of one frame, not of {num_frames}"
            raise ValueError(f"frame_pooling is {pooling!r}, but {reason}. Use frame_pooling='mean'.")

    def image_features(self, pixel_values: Tensor, **side_inputs: Tensor) -> Tensor:
        """Output of the vision tower `(B, M, D)` for the output of `encode_images`, which batches and `generate` accept instead."""
        inputs = {name: value.to(self.device) for name, value in side_inputs.items()}
        inputs["pixel_values"] = pixel_values.to(self.device)
        return _with_gathered_weights(self.model, lambda: self.encode(self.base_model, inputs))

    def freeze_vision(self) -> None:
        """Exclude the vision tower from training, so that `image_features` can be computed once."""
        self.vision_tower.requires_grad_(False)

    def vision_state(self) -> dict[str, Tensor]:
        """All weights that `image_features` depend on, by name."""
        return self.vision_tower.state_dict()

    def vision_signature(self) -> str:
        """The model's family, `@`, and a hash of the vision tower's weights and of the image processor's settings.

        Captioners that were finetuned with a frozen tower share it, and so the cached features.
        """
        digest = hashlib.blake2b(digest_size=12)
        for name, value in self.vision_state().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        digest.update(processor_settings(self.image_processor).encode())
        return f"{self.family}@{digest.hexdigest()}"

    # Captions

    def encode_captions(self, captions: Sequence[str], *, max_length: int | None = 40) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `labels` `(B, T)` of captions with the prompt.

        The caption and the end token are supervised; start token, prompt and padding are not. Captions whose row would be
        longer than `max_length` tokens, or than the model's positions, are truncated and then lack the end token. None
        truncates nothing, to count tokens.
        """
        if not captions:
            raise ValueError("There are no captions to encode. Pass at least one per image.")
        for row, caption in enumerate(captions):
            if not caption.strip():
                raise ValueError(f"Caption {row} ({caption!r}) is empty. Remove it; check_captions finds such rows.")
        before = self.prompt_ids()
        max_length = None if max_length is None else min(max_length, self.max_text_tokens)
        if max_length is not None and len(before) >= max_length:
            size = f"takes {len(before)} tokens with the start token of max_length ({max_length})"
            raise ValueError(f"The prompt {self.text_prompt!r} {size}. Raise max_length or shorten the prompt.")
        prompt, prompt_ids = self.text_prompt.rstrip(" "), self._own_prompt_ids()
        text = prompt + (" " if prompt and not prompt[-1].isspace() else self.lead)
        ids = self.tokenizer(
            [text + caption.strip() for caption in captions], add_special_tokens=False, verbose=False
        ).input_ids
        rows = []
        for caption, whole in zip(captions, ids, strict=True):
            tokens = list(whole[len(prompt_ids) :])
            if list(whole[: len(prompt_ids)]) != prompt_ids:
                # The tokenizer merged the last word of the prompt with the first word of the caption.
                tokens = list(self.tokenizer(caption.strip(), add_special_tokens=False, verbose=False).input_ids)
            rows.append((before + tokens + [self.eos_token_id])[:max_length])
        return self._batch(rows)

    def _batch(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, `labels` `(B, T)`, padded on the right; the prompt's ids are not supervised."""
        tensors = [torch.tensor(row) for row in rows]
        input_ids = pad_sequence(tensors, batch_first=True, padding_value=self.pad_token_id)
        attention_mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True)
        labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
        labels[:, : len(self.prompt_ids())] = IGNORE_INDEX
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    def encode_completions(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Token ids and labels of generated completions, to score them with `log_probs`.

        `ids` and `mask` `(N, T)` are those of [`Completions`]; without a mask, captions end with the first end token.
        """
        before = self.prompt_ids()
        batch = self._batch([before + row for row in self._caption_ids(ids, mask)])
        return {name: value.to(ids.device) for name, value in batch.items()}

    def _caption_ids(self, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
        if mask is None:
            mask, _ = completion_mask(ids, end_ids=self.end_token_ids, pad_id=self.pad_token_id)
        return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]

    def collate(
        self,
        images: Sequence[Image.Image] | Sequence[Tensor] | None,
        captions: Sequence[str],
        *,
        image_features: Tensor | None = None,
        max_length: int = 40,
    ) -> dict[str, Tensor]:
        """Create a batch, the inputs of the model, from images and captions.

        Args:
            images (`Sequence`, *optional*): B images (`PIL.Image.Image`), or rows of `prepare_pixels`.
            captions (`Sequence[str]`): B captions, or a multiple of B; the captions of one image are consecutive.
            image_features (`torch.Tensor` of shape `(B, M, D)`, *optional*): Features to use instead of images.
            max_length (`int`): Longest row in tokens, including start token, prompt and end token.
        """
        batch = self.encode_captions(captions, max_length=max_length)
        if images is not None:
            return batch | self.encode_inputs(images)
        assert image_features is not None
        return batch | {"image_features": image_features, **self.fixed_side_inputs(len(image_features))}

    @staticmethod
    def align_labels(labels: Tensor) -> Tensor:
        """Labels `(B, T)` as a head objective gets them, `(B, T - 1)`: position t of the hidden states predicts position t."""
        return labels[:, 1:]

    def decode(self, ids: Tensor, mask: Tensor | None = None) -> list[str]:
        """Stripped captions without special tokens; arguments as for `encode_completions`."""
        rows = self._caption_ids(ids, mask)
        texts = [self.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
        # After first-token shifting, captions begin with the "##" form of their first word.
        return [text.removeprefix("##") for text in texts] if is_word_piece(self.tokenizer) else texts

    # Scoring

    def log_probs(
        self,
        batch: dict[str, Any],
        *,
        temperature: float = 1.0,
        return_entropy: bool = False,
        of_generation: bool = False,
        model: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probability of every supervised token, without building the logits of the whole batch.

        `batch` is the output of `collate` or `encode_completions` with images or features, `model` the model in a wrapper such
        as DDP. With `of_generation`, the distribution is that of sampling: without ids beyond the tokenizer. The result `(B, T - 1)` is aligned with `align_labels(labels)` and 0 at unsupervised positions; with
        `return_entropy` it is a pair with the entropies of the distributions.
        """
        model = self.model if model is None else model
        num_tokens = self.num_tokens if of_generation else None
        batch = {**self.fixed_side_inputs_missing_in(batch), **batch}
        batch = {name: value.to(self.device) for name, value in batch.items()}
        output = model(**batch, head_objective=LogProbsObjective(temperature, return_entropy, num_tokens))
        return (output["log_probs"], output["entropy"]) if return_entropy else output["log_probs"]

    def own_loss(self, batch: dict[str, Any]) -> Tensor:
        """The loss that the model itself computes, as plain mean cross-entropy."""
        return self.model(**batch).loss

    def self_check(self, batch: dict[str, Any], atol: float | None = None) -> float:
        """Compare the mean cross-entropy through the head tap with the model's own loss, and use full logits if they differ.

        `batch` is the output of `collate` on the model's device; `atol`, in nats, is by default 1e-3 in fp32 and 0.05 in 16 bits.
        Returns the difference.
        """
        batch = first_rows(batch)
        if atol is None:
            weight = next(self.model.parameters())
            half = torch.is_autocast_enabled(weight.device.type) or weight.element_size() < 4
            atol = 0.05 if half else 1e-3
        with evaluating(self.model), torch.no_grad():  # with dropout, two forwards would differ
            own = float(self.own_loss(batch))
            try:
                tapped = float(self.model(**batch, head_objective=mean_cross_entropy).loss)
            except (RuntimeError, TypeError, AttributeError) as error:
                logger.warning("The head tap failed: %s", error)
                tapped = float("nan")
            difference = abs(tapped - own)
            if difference <= atol:
                return difference
            was_full, self.use_full_logits = self.use_full_logits, True
            full = float(self.model(**batch, head_objective=mean_cross_entropy).loss)
        failed = "" if abs(full - tapped) <= atol else " FAILED"
        reason = (
            "It changes the logits after the output projection. Full logits are used: correct, but slower and larger."
        )
        if not failed:
            self.use_full_logits = was_full
            reason = "Its loss smooths, weights or shifts differently. Training uses the cross-entropy."
        told = "SELF-CHECK%s: cross-entropy is %.6f through the head tap, %.6f from full logits, and %.6f in %s itself. %s"
        logger.warning(told, failed, tapped, full, own, type(self.base_model).__name__, reason)
        return difference

    # Generation

    def generate(
        self,
        *,
        pixel_values: Tensor | None = None,
        image_features: Tensor | None = None,
        max_new_tokens: int = 40,
        greedy_first: bool = False,
        **kwargs: Any,
    ) -> Completions:
        """Generate captions in eval mode. Each image is encoded once for all its captions and beams.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, H, W)`, *optional*): Output of `encode_images`.
            image_features (`torch.Tensor` of shape `(B, M, D)`, *optional*): Features that replace the pixels.
            max_new_tokens (`int`): Longest caption, including the end token; limited by the model's positions.
            greedy_first (`bool`): Whether the sampled captions of each image follow its greedy caption.
            kwargs: The other outputs of `encode_images`, and arguments of transformers' `generate`: `num_beams`,
                `do_sample`, `num_return_sequences`, `cache_implementation`, ...

        Returns:
            [`Completions`]: N = B * `num_return_sequences` captions, or B * (1 + `num_return_sequences`) with
                `greedy_first`; those of one image are consecutive.

        Raises:
            ValueError: If both or neither of `pixel_values` and `image_features` are given.
        """
        if (pixel_values is None) == (image_features is None):
            raise ValueError("generate needs images once. Pass either pixel_values or image_features.")
        with evaluating(self.model), torch.no_grad():
            images = {name: kwargs.pop(name) for name in self.side_inputs if name in kwargs}
            images |= {"image_features": image_features} if pixel_values is None else {"pixel_values": pixel_values}
            images |= self.fixed_side_inputs_missing_in(images)
            settings = {"max_new_tokens": max_new_tokens, **kwargs}
            ids = _with_gathered_weights(self.model, lambda: self._write(images, settings, greedy_first))
        mask, ended = completion_mask(ids, end_ids=self.end_token_ids, pad_id=self.pad_token_id)
        return Completions(ids=ids, captions=self.decode(ids, mask), ended=ended, mask=mask)

    def _write(self, images: dict[str, Tensor], settings: dict[str, Any], greedy_first: bool) -> Tensor:
        """Ids after the prompt `(N, T)`: from our decoding loop, or from that of transformers where ours does not apply."""
        images = {name: value.to(self.device) for name, value in images.items()}
        features = images.pop("image_features", None)
        if features is None:
            features = self.encode(self.base_model, images)
            del images["pixel_values"]
        features = features.to(floating_dtype(self.vision_tower, features.dtype))  # (B, M, D)
        before = self.prompt_ids()
        prompt_ids = torch.tensor([before], device=self.device).repeat(features.size(0), 1)  # (B, P)
        settings = {"eos_token_id": list(self.end_token_ids), "pad_token_id": self.pad_token_id, **settings}
        settings["max_new_tokens"] = min(settings["max_new_tokens"], self.max_text_tokens - len(before))
        if self.num_tokens is not None:
            processors = LogitsProcessorList([FirstTokens(self.num_tokens), *(settings.get("logits_processor") or ())])
            settings["logits_processor"] = processors

        def write(further: dict[str, Any]) -> Tensor:
            return self.generate_ids(features, prompt_ids, dict(images), **further)  # (N, T)

        sharded = is_sharded(self.model)
        if sharded:  # all processes must run until the last one has finished, because they gather the weights together
            settings.setdefault("synced_gpus", True)
        names = ("do_sample", "num_return_sequences", "num_beams")
        do_sample, number, num_beams = (self._known(settings, name) or 0 for name in names)
        number = max(1, number)
        # With beams, `generate` would prepare (and in an encoder-decoder encode) the inputs before the loop could refuse.
        decodable = num_beams <= 1 and (do_sample or (number == 1 and not greedy_first))
        if decodable and self.own_loop and not sharded and settings.get("custom_generate") is None:
            with suppress(UndecodableError):
                loop = DecodingLoop(
                    num_sampled=number if do_sample else 0,
                    greedy=greedy_first or not do_sample,
                    folded=self.base_model.folds_cross_attention,
                )
                return write({**settings, "num_return_sequences": 1, "custom_generate": loop})
        if not greedy_first:
            return write(settings)
        sampling = ("temperature", "top_k", "top_p", "min_p", "typical_p")
        plain = {name: value for name, value in settings.items() if name not in sampling}
        greedy = write({**plain, "do_sample": False, "num_beams": 1, "num_return_sequences": 1})  # (B, S)
        sampled = write(settings)  # (B * G, T)
        width = max(greedy.size(1), sampled.size(1))
        parts = [F.pad(part, (0, width - part.size(1)), value=self.pad_token_id) for part in (greedy, sampled)]
        return torch.cat([part.view(len(greedy), -1, width) for part in parts], 1).flatten(0, 1)

    def _known(self, settings: dict[str, Any], name: str) -> Any:
        """A setting of `generate`: from the arguments, a given configuration, or the configuration of the model."""
        configs = (settings.get("generation_config"), self.writer.generation_config)
        sources = [settings, *(vars(config) for config in configs if config is not None)]
        return next((source[name] for source in sources if source.get(name) is not None), None)

    # Adapters

    def lora_targets(self, tune: Tune = "language") -> str:
        """A regular expression for the names of the modules that get LoRA, for PEFT's `target_modules`.

        For ClipCap, the modules of the code of "No Detail Left Behind"; elsewhere attention and the output of the MLP.
        """
        patterns = [self.language_lora][: tune != "vision"] + [self.vision_lora][: tune != "language"]
        for pattern in patterns:
            if not any(re.fullmatch(pattern, name) for name, _ in self.base_model.named_modules()):
                kind = type(self.base_model).__name__
                raise ValueError(f"No module of {kind} matches {pattern!r}. Pass target_modules.")
        return "|".join(f"(?:{pattern})" for pattern in patterns)

    def lora_config(
        self,
        tune: Tune = "language",
        r: int = 32,
        alpha: float = 16,
        dropout: float = 0.0,
        *,
        init: Literal["peft", "paper"] = "peft",
        target_modules: str | list[str] | None = None,
        modules_to_save: list[str] | None = None,
    ) -> LoraConfig:
        """The paper's LoRA configuration for this model.

        Reference: "No Detail Left Behind", SR-L, SR-V and SR-LV (`tune="language"`, `"vision"`, `"both"`).

        Args:
            tune: The part to adapt.
            r (`int`): Rank.
            alpha (`float`): Scaling is `alpha / r`.
            dropout (`float`): Dropout on the adapters' input, in [0, 1).
            init: Initial factors of the update. `"peft"`: A is uniform with standard deviation `1 / sqrt(3 * width)`, B is 0.
                `"paper"`: one factor is N(0, 1) and the other 0, as in the authors' code, so that the first updates are
                `sqrt(3 * width)` times larger (48 times for GPT-2). It takes effect in `add_adapter` and in the
                trainers, not in `peft.get_peft_model`.
            target_modules (`str` or `list[str]`, *optional*): Modules to adapt instead of `lora_targets(tune)`.
            modules_to_save (`list[str]`, *optional*): Modules that are trained in full; by default those between the
                vision tower and the language model, if there are any.

        Returns:
            `peft.LoraConfig`: For `peft_config` of a trainer, or for `peft.get_peft_model`.
        """
        from peft import LoraConfig

        if modules_to_save is None:
            present = {name for name, _ in self.base_model.named_modules()}
            modules_to_save = [name for name in self.connector_paths if name in present]
        config = LoraConfig(
            r=r,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=target_modules or self.lora_targets(tune),
            modules_to_save=modules_to_save or None,
            task_type=None,  # PEFT's wrappers of task types expect text-only inputs
        )
        # PEFT has no N(0, 1): its "gaussian" has standard deviation 1/r. Not a field, so that PEFT can read the saved file.
        config.captionrl_standard_normal = init == "paper"  # type: ignore[attr-defined]
        return config

    def add_lora(self, tune: Tune = "language", **settings: Any) -> None:
        """Wrap the model with LoRA, so that only the adapter and `modules_to_save` are trained; see `lora_config`."""
        self.add_adapter(self.lora_config(tune, **settings))

    def add_adapter(self, config: PeftConfig) -> None:
        """Wrap the model with a PEFT adapter.

        `target_modules` defaults to PEFT's default for the model type, and to `lora_targets("language")` if PEFT has none.
        `task_type` is ignored: PEFT's wrappers of task types expect text-only inputs.
        """
        from peft import get_peft_model
        from peft.tuners.lora.layer import LoraLayer
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN_TARGETS
        from transformers.pytorch_utils import Conv1D

        if hasattr(self.model, "peft_config"):
            raise ValueError(
                "The model already has an adapter. Omit peft_config, or call model.merge_and_unload() first."
            )
        if config.is_prompt_learning:
            raise ValueError(f"peft_config is a {type(config).__name__}, a learned prompt. Use peft.LoraConfig.")
        config = copy.deepcopy(config)  # PEFT modifies it, and several models may share a configuration
        config.task_type = None
        known = self.base_model.config.model_type in KNOWN_TARGETS or config.peft_type != "LORA"
        if getattr(config, "target_modules", "") is None and not known:
            config.target_modules = self.lora_targets("language")  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            # PEFT detects per layer that GPT-2 stores its weights transposed, and uses a name that transformers renamed.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to|`is_gradient_checkpointing`")
            before = set(self.model.modules())  # a part of the model, such as its language model, may have an adapter
            self.model = get_peft_model(self.model, config)
        if not getattr(config, "captionrl_standard_normal", False):
            return
        # One factor of every new adapter from N(0, 1), the other 0: `W + (B A) * alpha / rank` of the authors with B = 0.
        for layer in (module for module in self.model.modules() if isinstance(module, LoraLayer)):
            # The authors multiply B and A in the order of the stored weight, and Conv1D stores (in, out) instead of (out, in).
            swapped = isinstance(layer.get_base_layer(), Conv1D)
            for first, second in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
                if first not in before:
                    random, zero = (second, first) if swapped else (first, second)
                    nn.init.normal_(random.weight)
                    nn.init.zeros_(zero.weight)

    # Saving

    def save_processor(self, folder: str | os.PathLike[str]) -> None:
        """Save the processor, the prompt and the frame pooling."""
        self.processor.save_pretrained(folder)
        settings: dict[str, Any] = {"family": self.family, "prompt": self.prompt}
        if self.num_frames:
            settings |= {"frame_pooling": self.frame_pooling, "num_frames": self.num_frames}
        write_json(os.path.join(folder, SETTINGS_FILE), settings)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save everything that `load_captioner` needs: the model, or only its adapter; processor and prompt."""
        self.model.save_pretrained(folder)
        self.save_processor(folder)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, overwrite: bool = False
    ) -> str:
        """Save with a model card and push to the Hub, after the checks of every push: safetensors only, no secrets.

        A missing repository `repo_id` is created, by default as a private one; `overwrite` also pushes to one that has other
        content. Returns the URL of the commit.
        """
        from hf_captionrl.hub.push import push_captioner  # a higher layer, imported when it is used

        return str(push_captioner(self, repo_id, private=private is not False, token=token, overwrite=overwrite))
