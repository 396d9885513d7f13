"""Chat models: LLaVA, Qwen-VL, SmolVLM, InternVL, Gemma 3, PaliGemma, and any other type that passes a check on two images.

Legend: B images, N captions, P tokens of the prefix, T tokens of the text, M image tokens (of the image with most), D features,
L layers with additional features (DeepStack), V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from packaging import version
from PIL import Image
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hf_captionrl.captioners.captioner import Captioner, Tune, start_token_settings
from hf_captionrl.captioners.decoding import DecodingLoop
from hf_captionrl.captioners.head_tap import (
    evaluating,
    floating_dtype,
    join_prefix,
    left_padded,
    repeat_rows,
    stack_rows,
)
from hf_captionrl.captioners.loading import register
from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX
from hf_captionrl.utils.images import to_rgb

logger = logging.getLogger(__name__)

# Outputs of processors besides pixels and text that the models need; Qwen-VL computes positions from the first.
_PER_IMAGE = ("image_grid_thw", "image_sizes", "pixel_attention_mask")
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # names that processors use for token types
# Model types for which `lists_features` is true.
_LISTED = frozenset({"llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
# Widths and heights of test images. A processor whose outputs are equal for all of them has one output size.
_PROBE_SIZES = ((64, 64), (400, 100), (90, 200), (30, 20), (900, 1200))
_PROBE = "PROBE"  # a caption, to see where the chat template puts it


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
    reads_image_tokens = True
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
    _fixed: tuple[str, dict[str, Tensor] | None] | None = None

    def check_fit(self) -> None:
        super().check_fit()
        expected, name = self.base_model.config.image_token_id, type(self.processor).__name__
        token = getattr(self.processor, "image_token", None)  # a string, or an AddedToken
        token_id = None if token is None else self.tokenizer.convert_tokens_to_ids(str(token))
        # Gemma 3's image_token is a placeholder of the template, which the processor replaces with the tokenizer's token.
        if token is None or expected not in (token_id, getattr(self.tokenizer, "image_token_id", None)):
            ids = f"{token} with the id {token_id}, but {type(self.base_model).__name__} needs the id {expected}"
            raise ValueError(f"The image token of the {name} is {ids}. Pass the processor of the model.")
        if str(token) not in self._turns()[0]:
            raise ValueError(f"The chat template of the {name} has no image token ({token}). Set its chat_template.")

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
        start = self._prefix_of(Image.new("RGB", (32, 32)))["input_ids"][-1]
        return self.require_ids(start, list(self._end_ids), self._end_ids[0] if pad is None else pad)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def _turns(self) -> tuple[str, str]:
        """The chat before the caption, and the chat with a caption (`_PROBE`)."""
        if self._rendered is None or self._rendered[0] != self.prompt:
            self._rendered = (self.prompt, self._render())
        return self._rendered[1]

    def _render(self) -> tuple[str, str]:
        if getattr(self.processor, "chat_template", None) is None:
            turn = self.plain_turn()
            return turn, turn + _PROBE
        content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
        before = [{"role": "user", "content": content[: 2 if self.prompt else 1]}]
        answered = [*before, {"role": "assistant", "content": [{"type": "text", "text": _PROBE}]}]
        # Templates of reasoning models then close the reasoning; for others, transformers warns of the setting.
        thinks = {"enable_thinking": False} if "enable_thinking" in str(self.processor.chat_template) else {}
        render = functools.partial(self.processor.apply_chat_template, tokenize=False, **thinks)
        return render(before, add_generation_prompt=True), render(answered, add_generation_prompt=False)

    def plain_turn(self) -> str:
        """The text before the caption if there is no chat template: image token and prompt on separate lines."""
        token = self.processor.image_token
        return f"{token}\n{self.prompt}\n" if self.prompt else f"{token}\n"

    # Images

    def _prefix_of(self, image: Image.Image) -> dict[str, Any]:
        """The processor's output for an image and the chat before the caption: lists of ids and types, tensors."""
        text = self._turns()[0]
        settings = {"return_tensors": "pt", **start_token_settings(self.processor, text)}
        read = self.processor(text=[text], images=[to_rgb(image)], **settings)
        ids = read["input_ids"][0].tolist()
        types = next((read[name][0].tolist() for name in _TOKEN_TYPES if name in read), [0] * len(ids))
        tensors = {name: torch.as_tensor(read[name]) for name in ("pixel_values", *self.per_image) if name in read}
        return {"input_ids": ids, "types": types, **tensors}

    def encode_images(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        rows = [self._prefix_of(image) for image in images]
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
        """The side inputs of any image, as one row; None if they differ."""
        if self._fixed is None or self._fixed[0] != self.prompt:
            rows = [self._side_inputs([self._prefix_of(Image.new("RGB", size))]) for size in _PROBE_SIZES]
            same = all(torch.equal(rows[0][name], row[name]) for row in rows[1:] for name in rows[0])
            self._fixed = (self.prompt, rows[0] if same else None)
        return self._fixed[1]

    def fixed_side_inputs(self, number: int) -> dict[str, Tensor]:
        fixed = self._fixed_or_none()
        if fixed is None:
            reason = "splits images into tiles or keeps their size, so that features alone do not determine its inputs"
            raise ValueError(
                f"{type(self.base_model).__name__} {reason}. Leave out cache_image_features and cache_pixels, "
                "or pass a processor with one size (do_image_splitting=False, crop_to_patches=False, min_pixels=max_pixels)."
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
        left_out = {*cls.side_inputs, "pixel_values"}
        native = {name: value for name, value in join_prefix(inputs).items() if name not in left_out}
        accepted = inspect.signature(model.forward).parameters
        for name in [name for name in _TOKEN_TYPES if name in accepted][:1]:
            types = repeat_rows(inputs["prefix_types"], rows)
            native[name] = torch.cat([types, cls.text_types(inputs["input_ids"])], 1)
        if "image_grid_thw" in inputs:
            native["image_grid_thw"] = repeat_rows(inputs["image_grid_thw"], rows).flatten(0, 1)
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
        accepted = inspect.signature(model.model.get_image_features).parameters
        pixels = torch.cat([value[:number] for value, number in zip(inputs["pixel_values"], rows, strict=True)])
        sizes = {n: inputs[n].flatten(0, 1).to(device) for n in _PER_IMAGE if n in inputs and n in accepted}
        output = model.model.get_image_features(pixels.to(device, dtype), **sizes, return_dict=True)
        counts = (inputs["prefix_ids"] == model.config.image_token_id).sum(1).tolist()
        return cls.padded_features(model, flat_features(output), counts)

    @staticmethod
    def padded_features(model: Any, flat: Tensor, counts: list[int]) -> Tensor:
        """`(sum of M, D)` -> `(B, M, D)` for images with `counts` tokens."""
        if len(flat) != sum(counts):
            size = f"{len(flat)} features for {sum(counts)} image tokens"
            raise ValueError(f"{type(model).__name__} returned {size}. Load processor and model from one checkpoint.")
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(counts)), batch_first=True)

    @classmethod
    def lists_features(cls, model: Any) -> bool:
        """Whether the forward takes a list of `(M, D)`, one entry per image, instead of `(tiles, tokens, D)`."""
        return model.config.model_type in _LISTED

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        # Padded features `(N, M, (1 + L) D)` in the form that `get_image_features` returns.
        counts = (inputs.pop("prefix_ids") == model.config.image_token_id).sum(1).tolist()
        layers: list[Any] = [
            [row[:count] for row, count in zip(layer, counts, strict=True)]
            for layer in features.split(model.get_input_embeddings().weight.shape[1], dim=-1)
        ]
        if not cls.lists_features(model):
            # Images may differ in their number of tiles, but all tiles have the same number of tokens.
            layers[0] = torch.cat(layers[0]).unflatten(0, (-1, math.gcd(*counts)))
        output: Any = BaseModelOutputWithPooling(pooler_output=layers[0])
        if len(layers) > 1:
            output.deepstack_features = layers[1:]
        inputs["mm_encoder_outputs"] = {"image": output}
        yield


@register
class PaliGemmaCaptioner(ChatCaptioner):
    """PaliGemma, with bidirectional attention over image and prompt, and causal attention over the caption."""

    family = "paligemma"
    model_types = ("paligemma",)
    default_prompt = "caption en"

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


# --- Types without a family of their own: loaded if a check on two images passes --------------------------------------
# A processor knows which inputs its model needs. Each image is therefore encoded alone, with the processor's output for it as it
# is, so that no layout of tiles, patches or positions has to be known here. Slower than the batches of tested families.

# Inputs of an image besides its pixels, by their names in the model types of transformers.
_ANY_PER_IMAGE = tuple(
    """aspect_ratio_ids aspect_ratio_mask cross_attention_mask high_res_pixel_values image_grid_hw image_grid_thw image_grids
    image_merge_sizes image_position_ids image_sizes image_token_pooling num_local_patches patches_grid pixel_attention_mask
    pixel_mask pixel_values_local spatial_shapes target_sizes tile_fine_mask""".split()
)


class AnyChatCaptioner(ChatCaptioner):
    """A chat model of any type of `AutoModelForImageTextToText`, if `check_loaded` finds that it computes the same as alone.

    LoRA adapts every linear layer of language model or vision tower. Videos are read frame by frame.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    per_image = _ANY_PER_IMAGE
    side_inputs: ClassVar[tuple[str, ...]] = (*ChatCaptioner.side_inputs, "image_shapes", *_ANY_PER_IMAGE)
    language_models: ClassVar[tuple[str, ...]] = ("language_model", "text_model")

    @classmethod
    def for_config(cls, config: Any) -> type[Captioner]:
        model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        if "mm_encoder_outputs" not in inspect.signature(model_class.forward).parameters:
            raise ValueError(
                f"The forward of {model_class.__name__} (model type {config.model_type!r}) takes no mm_encoder_outputs, with "
                "which an image is read once for all its captions. Use a model of docs/families.md."
            )
        return cls

    def check_fit(self) -> None:
        # Tokenizers of some types have more tokens than the head.
        if getattr(self.processor, "chat_template", None) is None or not hasattr(self.base_model, "lm_head"):
            raise ValueError(
                f"{type(self.base_model).__name__} needs a processor with a chat template, and an lm_head."
            )

    # Parts of the model

    def _language_model(self) -> Any:
        inner = self.base_model.model
        return next((getattr(inner, name) for name in self.language_models if hasattr(inner, name)), None)

    def _beside_the_tower(self) -> dict[str, Tensor]:
        """All weights outside of tower, language model and head: connectors, and parts for other inputs, such as sound."""
        parts = (self.vision_tower, self._language_model())
        inside = {id(p) for part in parts for p in part.parameters()}
        return {name: p for name, p in self.base_model.model.named_parameters() if id(p) not in inside}

    def lora_targets(self, tune: Tune = "language") -> str:
        parts = [self._language_model()][: tune != "vision"] + [self.vision_tower][: tune != "language"]
        names = {id(module): name for name, module in self.base_model.named_modules()}
        patterns = []
        for part in parts:
            leaves: tuple[set[str], set[str]] = (set(), set())  # of other modules, of linear layers
            for name, module in part.named_modules():
                leaves[isinstance(module, nn.Linear)].add(name.rpartition(".")[2])
            prefix = re.escape(names[id(part)])
            patterns.append(rf"{prefix}\.(?:.+\.)?(?:{'|'.join(sorted(leaves[1] - leaves[0]))})")
        return "|".join(f"(?:{pattern})" for pattern in patterns)

    @classmethod
    def lists_features(cls, model: Any) -> bool:
        return model.lists_features

    # Images

    def _side_inputs(self, rows: Any) -> dict[str, Tensor]:
        batch = super()._side_inputs(rows)
        names = [name for name in ("pixel_values", *_ANY_PER_IMAGE) if name in rows[0]]
        # (B, inputs, dimensions), 0 beyond the dimensions of an input: the sizes before the rows were padded
        shapes = [[F.pad(torch.tensor(row[n].shape), (0, 6 - row[n].dim())) for n in names] for row in rows]
        batch["image_shapes"] = torch.stack([torch.stack(row) for row in shapes])
        return batch

    @classmethod
    def outputs_of_the_processor(cls, model: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        """For each image, the processor's output for it: pixels in the dtype of the vision tower."""
        tower = cls.find_vision_tower(model)
        device, dtype = next(tower.parameters()).device, floating_dtype(tower, torch.float32)
        names = [name for name in ("pixel_values", *_ANY_PER_IMAGE) if name in inputs]
        for row, shapes in enumerate(inputs["image_shapes"].tolist()):
            outputs = {}
            for name, shape in zip(names, shapes, strict=True):
                value = inputs[name][row].to(device)
                value = value[tuple(slice(size) for size in shape[: value.dim()])]
                outputs[name] = value.to(dtype) if value.is_floating_point() else value
            yield outputs

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        accepted = inspect.signature(model.model.get_image_features).parameters
        parts = []
        for outputs in cls.outputs_of_the_processor(model, inputs):
            arguments = {name: value for name, value in outputs.items() if name in accepted}
            output = model.model.get_image_features(**arguments, return_dict=True)
            model.lists_features = not isinstance(output.pooler_output, Tensor)
            parts.append(flat_features(output))
        counts = (inputs["prefix_ids"] == model.config.image_token_id).sum(1).tolist()
        if [len(part) for part in parts] != counts:
            raise ValueError(f"it returned {[len(part) for part in parts]} features for {counts} image tokens")
        return cls.padded_features(model, torch.cat(parts), counts)

    # The check

    def check_loaded(self) -> None:
        """Compare labels, log-probabilities and greedy captions on two noise images with the model alone; raise, or log one line."""
        model, noise = self.base_model, np.random.default_rng(0)
        # Of different numbers of tiles or patches.
        images = [
            Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((48, 64), (80, 200))
        ]
        # Relative; padded rows round differently.
        tolerance = 1e-4 if floating_dtype(model, torch.float32).itemsize >= 4 else 0.05
        settings: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": 8,
            "suppress_tokens": list(self.end_token_ids),
        }
        try:
            with evaluating(self.model), torch.no_grad():
                inputs = self.encode_images(images)
                batch = {**inputs, **self.encode_captions(["a red cat on a tree", "two dogs"])}
                batch = {name: value.to(self.device) for name, value in batch.items()}
                self.self_check(batch)
                log_probs, labels = cast(Tensor, self.log_probs(batch)), self.align_labels(batch["labels"])
                for row, image in enumerate(images):
                    supervised = labels[row] != IGNORE_INDEX
                    expected = self._log_probs_alone(image, labels[row][supervised])
                    difference = float((log_probs[row][supervised].float() - expected).abs().mean())
                    if not difference <= tolerance * (1 + float(expected.abs().mean())):
                        raise ValueError(f"log-probabilities differ from those of the model alone by {difference:.4g}")
                self.own_loop = False
                captions = self.generate(**inputs, **settings).ids
                with suppress(Exception):  # UndecodableError, or one of a loop that does not fit the model
                    loop = DecodingLoop(num_sampled=0, greedy=True, folded=False)
                    self.own_loop = torch.equal(
                        self.generate(**inputs, **settings, custom_generate=loop).ids, captions
                    )
        except Exception as error:  # of the code of any model
            reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise ValueError(
                f"{type(model).__name__} (model type {model.config.model_type!r}) has no tested family, and the check on two "
                f"images failed: {reason}. Use a model of docs/families.md."
            ) from error
        logger.warning(
            "Model type %r has no tested family. Checked on two images against the model alone: labels, log-probabilities (%s), "
            "greedy captions. Each image is encoded alone.",
            model.config.model_type,
            "full logits" if self.use_full_logits else "head tap",
        )

    def _log_probs_alone(self, image: Image.Image, labels: Tensor) -> Tensor:
        """Log-probabilities `(T,)` of caption and end token from the processor's output for the whole chat."""
        caption, before = self.tokenizer.decode(labels[:-1]).strip(), self._turns()[0]
        settings = start_token_settings(self.processor, before)
        text = [before + self.lead + caption]
        inputs = self.processor(text=text, images=[image], return_tensors="pt", **settings)
        first = len(self._prefix_of(image)["input_ids"])
        if inputs["input_ids"][0, first:].tolist() != labels[:-1].tolist():
            raise ValueError("the labels of a caption differ from the processor's ids of the whole chat")
        dtype = floating_dtype(self.vision_tower, torch.float32)
        batch = {name: torch.as_tensor(value).to(self.device) for name, value in inputs.items()}
        batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        log_probs = self.model(**batch).logits[0, first - 1 :].float().log_softmax(-1)  # (T, V)
        return log_probs.gather(-1, labels[:, None]).squeeze(-1)
