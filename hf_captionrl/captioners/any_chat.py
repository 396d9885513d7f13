"""Chat models of types that have no family of their own: loaded if a check on two images passes.

A processor knows which inputs its model needs. Each image is therefore encoded alone, with the processor's output for it as it
is, so that no layout of tiles, patches or positions has to be known here. Slower than the batches of tested families.

Legend: B images, N captions, P tokens of the prefix, T tokens of the text, M image tokens (of the image with most), D features,
L layers with additional features (DeepStack), V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hf_captionrl.captioners.captioner import Captioner, Tune, blank_image, start_token_settings
from hf_captionrl.captioners.chat import ChatCaptioner, flat_features
from hf_captionrl.captioners.decoding import DecodingLoop
from hf_captionrl.captioners.head_tap import (
    HeadInputs,
    bypass_vision_tower,
    evaluating,
    floating_dtype,
    repeat_rows,
)
from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX

logger = logging.getLogger(__name__)

# Inputs of an image besides its pixels, by their names in the model types of transformers.
_PER_IMAGE = tuple(
    """aspect_ratio_ids aspect_ratio_mask cross_attention_mask high_res_pixel_values image_grid_hw image_grid_thw image_grids
    image_merge_sizes image_position_ids image_sizes image_token_pooling num_local_patches patches_grid pixel_attention_mask
    pixel_mask pixel_values_local spatial_shapes target_sizes tile_fine_mask""".split()
)
_OF_THE_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_CAPTIONS = ("a red cat on a tree", "two dogs")
_IMAGE_SIZES = ((64, 48), (200, 80))  # width and height: of different numbers of tiles or patches
_CHECKED_TOKENS = 8  # of a generated caption
_INSTEAD = "Use a model of a tested family: HuggingFaceTB/SmolVLM2-2.2B-Instruct, Qwen/Qwen3-VL-4B-Instruct, OpenGVLab/InternVL3_5-2B-HF"


def _refuse(name: str, kind: str, reason: str) -> NoReturn:
    raise ValueError(f"{name} (model type {kind!r}) is not a captioner of a supported family: {reason}. {_INSTEAD}.")


class AnyChatCaptioner(ChatCaptioner):
    """A chat model of any type of `AutoModelForImageTextToText`, if `check_loaded` finds that it computes the same as alone.

    LoRA adapts every linear layer of language model or vision tower. Videos are read frame by frame.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    per_image = _PER_IMAGE
    side_inputs: ClassVar[tuple[str, ...]] = (*ChatCaptioner.side_inputs, "image_shapes", *_PER_IMAGE)
    supports_static_cache = False
    language_models: ClassVar[tuple[str, ...]] = ("language_model", "text_model")

    @classmethod
    def for_config(cls, config: Any) -> type[Captioner]:
        if config.model_type == "mllama":
            return MllamaCaptioner
        model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        if "mm_encoder_outputs" not in inspect.signature(model_class.forward).parameters:
            reason = "its forward takes no mm_encoder_outputs, with which an image is read once for all its captions"
            _refuse(model_class.__name__, config.model_type, reason)
        return cls

    def check_fit(self) -> None:
        model, head = self.base_model, self.output_head(self.base_model)
        kind, what = model.config.model_type, type(self.processor).__name__
        inner = getattr(model, "model", None)
        reason = ""
        if getattr(self.processor, "chat_template", None) is None:
            reason = f"the {what} has no chat_template"
        elif not any(hasattr(inner, name) for name in self.towers) or self._language_model() is None:
            reason = f"none of its parts is called {' or '.join((*self.towers, *self.language_models))}"
        elif not isinstance(head, nn.Linear):
            reason = f"its output head is a {type(head).__name__}, not a linear layer"
        elif self.tokenizer.vocab_size > head.out_features:
            reason = f"the tokenizer has {self.tokenizer.vocab_size} tokens, the output head {head.out_features}"
        if reason:
            _refuse(type(model).__name__, kind, reason)
        try:
            found = self.processor(text=[self._turns()[0]], images=[blank_image()], return_tensors="pt")
        except Exception as error:  # of the code of any processor
            _refuse(type(model).__name__, kind, f"the {what} fails on an image with a chat ({_said(error)})")
        if not bool((torch.as_tensor(found["input_ids"]) == model.config.image_token_id).any()):
            _refuse(type(model).__name__, kind, f"the {what} writes no image token (id {model.config.image_token_id})")
        unknown = sorted({*found} - {*_PER_IMAGE, *_OF_THE_TEXT, "pixel_values"})
        read = inspect.signature(getattr(inner, "get_image_features", model.forward)).parameters
        if lost := [name for name in unknown if name in read]:
            _refuse(type(model).__name__, kind, f"it reads {' and '.join(lost)}, which are unknown here")

    # Parts of the model

    def _language_model(self) -> Any:
        inner = self.base_model.model
        return next((getattr(inner, name) for name in self.language_models if hasattr(inner, name)), None)

    def _beside_the_tower(self) -> dict[str, Tensor]:
        """All weights outside of tower, language model and head: connectors, and parts for other inputs, such as sound."""
        parts = (self.vision_tower, self._language_model())
        known = {id(p) for part in parts for p in part.parameters()}
        return {name: p for name, p in self.base_model.model.named_parameters() if id(p) not in known}

    def lora_targets(self, tune: Tune = "language") -> str:
        if tune not in ("language", "vision", "both"):
            return super().lora_targets(tune)  # raises
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

    def check_frame_pooling(self, pooling: str, num_frames: int) -> None:
        Captioner.check_frame_pooling(self, pooling, num_frames)

    def _side_inputs(self, rows: Any) -> dict[str, Tensor]:
        batch = super()._side_inputs(rows)
        names = [name for name in ("pixel_values", *_PER_IMAGE) if name in rows[0]]
        # (B, inputs, dimensions), 0 beyond the dimensions of an input: the sizes before the rows were padded
        shapes = [[F.pad(torch.tensor(row[n].shape), (0, 6 - row[n].dim())) for n in names] for row in rows]
        batch["image_shapes"] = torch.stack([torch.stack(row) for row in shapes])
        return batch

    @classmethod
    def own_inputs(cls, model: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        """For each image, the processor's output for it: pixels in the dtype of the vision tower."""
        tower = cls.find_vision_tower(model)
        device, dtype = next(tower.parameters()).device, floating_dtype(tower, torch.float32)
        names = [name for name in ("pixel_values", *_PER_IMAGE) if name in inputs]
        for row, shapes in enumerate(inputs["image_shapes"].tolist()):
            found = {}
            for name, shape in zip(names, shapes, strict=True):
                value = inputs[name][row].to(device)
                value = value[tuple(slice(size) for size in shape[: value.dim()])]
                found[name] = value.to(dtype) if value.is_floating_point() else value
            yield found

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        accepted = inspect.signature(model.model.get_image_features).parameters
        parts = []
        for own in cls.own_inputs(model, inputs):
            named = {name: value for name, value in own.items() if name in accepted}
            output = model.model.get_image_features(**named, return_dict=True)
            model.lists_features = not isinstance(output.pooler_output, Tensor)
            parts.append(flat_features(output))
        counts = (inputs["prefix_ids"] == model.config.image_token_id).sum(1).tolist()
        if [len(part) for part in parts] != counts:
            raise ValueError(f"it returned {[len(part) for part in parts]} features for {counts} image tokens")
        return cls.padded_features(model, torch.cat(parts), counts)

    # The check

    def check_loaded(self) -> None:
        """Compare tap, labels, log-probabilities and greedy captions with the model alone; raise, or log one line."""
        model = self.base_model
        noise = np.random.default_rng(0)
        images = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in _IMAGE_SIZES]
        # Relative; padded rows round differently.
        tolerance = 1e-4 if floating_dtype(model, torch.float32).itemsize >= 4 else 0.05
        try:
            with evaluating(self.model), torch.no_grad():
                batch = {name: value.to(self.device) for name, value in self.collate(images, _CAPTIONS).items()}
                self.self_check(batch)
                found, labels = cast(Tensor, self.log_probs(batch)), self.align_labels(batch["labels"])
                for row, image in enumerate(images):
                    supervised = labels[row] != IGNORE_INDEX
                    expected = self._log_probs_alone(image, labels[row][supervised])
                    difference = float((found[row][supervised].float() - expected).abs().mean())
                    if not difference <= tolerance * (1 + float(expected.abs().mean())):
                        raise ValueError(f"log-probabilities differ from those of the model alone by {difference:.4g}")
                loop = self._check_decoding(images, tolerance)
        except Exception as error:  # of the code of any model
            _refuse(type(model).__name__, model.config.model_type, f"the check on two images failed: {_said(error)}")
        logger.warning(
            "Model type %r has no tested family. Checked on two images against the model alone: labels, log-probabilities (%s), "
            "greedy captions (%s). Each image is encoded alone.",
            model.config.model_type,
            "full logits" if self.use_full_logits else "head tap",
            loop,
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
        found = {name: torch.as_tensor(value).to(self.device) for name, value in inputs.items()}
        found = {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}
        log_probs = self.model(**found).logits[0, first - 1 :].float().log_softmax(-1)  # (T, V)
        return log_probs.gather(-1, labels[:, None]).squeeze(-1)

    def _check_decoding(self, images: list[Image.Image], tolerance: float) -> str:
        """Choose the loop whose greedy captions have the largest logits of a forward of the whole caption; returns its name."""
        banned = [*self.end_token_ids, self.base_model.config.image_token_id]
        banned = [token for token in banned if token < self.vocab_size]  # Molmo 2 has no outputs for tokens of images
        banned += range(self.num_tokens or self.vocab_size, self.vocab_size)
        settings: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
        settings |= {"max_new_tokens": _CHECKED_TOKENS, "suppress_tokens": list(self.end_token_ids)}
        inputs = self.encode_images(images)

        def shortfall(head: HeadInputs) -> dict[str, Tensor]:
            hidden: Any = head.hidden
            logits = F.linear(hidden, head.weight, head.bias) if head.logits is None else head.logits  # (B, T, V)
            logits = logits.float().index_fill(-1, torch.tensor(banned, device=logits.device), -torch.inf)
            ignored = head.labels == IGNORE_INDEX
            chosen = logits.gather(-1, head.labels.masked_fill(ignored, 0)[..., None]).squeeze(-1)
            largest = logits.amax(-1)  # (B, T)
            return {"loss": ((largest - chosen) / (1 + largest.abs())).masked_fill(ignored, 0.0).amax()}

        self.own_loop = True
        for name, loop in (
            ("the package's decoding loop", DecodingLoop(num_sampled=0, greedy=True, folded=False)),
            ("generate of transformers", None),
        ):
            try:
                ids = self.generate(**inputs, **settings, custom_generate=loop).ids
                batch = {**inputs, **self.encode_completions(ids, torch.ones_like(ids, dtype=torch.bool))}
                batch = {key: value.to(self.device) for key, value in batch.items()}
                if float(self.model(**batch, head_objective=shortfall).loss) <= tolerance:
                    return name
            except Exception:  # UndecodableError, or one of a loop that does not fit the model
                if loop is None:
                    raise
            self.own_loop = False
        raise ValueError("greedy captions are not the tokens with the largest logits, so that decoding is wrong")


class MllamaCaptioner(AnyChatCaptioner):
    """Llama 3.2 Vision, whose text reads the image through cross-attention; the features are those of the vision tower."""

    @classmethod
    def encode(cls, model: Any, inputs: dict[str, Any]) -> Tensor:
        names, tower = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), cls.find_vision_tower(model)
        rows = [tower(**{n: own[n] for n in names}).last_hidden_state for own in cls.own_inputs(model, inputs)]
        return torch.stack([row.flatten(0, -2) for row in rows])  # (B, tiles * tokens, D)

    @classmethod
    def native_inputs(cls, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        native = super().native_inputs(model, inputs)
        if "prefix_ids" in native:
            mask = repeat_rows(inputs["cross_attention_mask"].flatten(0, 1), len(native["input_ids"]))
            # It ends with the start token of the text; later tokens see the same tiles.
            later = native["input_ids"].size(1) - mask.size(1)
            native["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].repeat_interleave(later, 1)], 1)
        return native

    @classmethod
    @contextmanager
    def known_features(cls, model: Any, features: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        inputs.pop("prefix_ids")
        with bypass_vision_tower(cls.find_vision_tower(model), features) as placeholder:
            # The ids are required, but only the tower reads them.
            inputs |= {"pixel_values": placeholder, "aspect_ratio_ids": placeholder.flatten(1).long()}
            yield


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
